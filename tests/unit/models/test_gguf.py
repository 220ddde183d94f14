"""A GGUF file gives the tokens and logits of the folder that it was converted from. The package `gguf` writes the files
and is the judge of their numbers."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from proa.model_tokenizer import ModelTokenizer
from proa_engine.config import EngineConfig
from proa_engine.kernels.int_weights import dequantize_int
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.quantized.ggml_blocks import dequantize
from proa_engine.layers.quantized.ggml_types import BLOCKS, INTEGER_BITS
from proa_engine.layers.quantized.quant_ggml import Ggml
from proa_engine.layers.weights import Projection, Slice, Weights
from proa_engine.models import read_config
from proa_engine.models.base import CausalLM
from proa_engine.models.loader import load_model
from proa_engine.models.quantization.by_module import ByModule
from proa_engine.models.quantization.formats import GgmlFormat
from proa_engine.models.weight_sources import CheckpointWeights
from proa_engine.preflight.check import check_start
from proa_engine.sources.folders import read_tokenizer_files
from proa_engine.sources.gguf.header import read_header
from proa_engine.sources.resolve import HubModel, LocalFolder, resolve_model, source_of
from support.gguf_files import ARCHITECTURES, F32, write_gguf
from support.paged_model import PagedModel
from support.tiny_models import EOS_TOKEN_ID, make_tiny_model

CPU = torch.device("cpu")
PROMPT = list(range(5, 90))
Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama biases": ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "granite": (
        "granite",
        {"attention_multiplier": 0.22, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 7.0},
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3 moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
    "lfm2": ("lfm2", {}),
    "gemma2": ("gemma2", {"tie_word_embeddings": True, "sliding_window": 24, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 6, "sliding_window": 24, "query_pre_attn_scalar": 16}),
}


def load(folder: Path) -> CausalLM:
    return load_model(
        folder,
        read_config.from_folder(folder),
        dtype=torch.float32,
        device=CPU,
        parallel=ParallelContext(),
        report=lambda line: None,
    )


def logits(folder: Path) -> torch.Tensor:
    model = load(folder)
    return model.compute_logits(PagedModel(model).prefill(PROMPT))


def mixed_types(name: str) -> gguf.GGMLQuantizationType:
    return Q8_0 if name.startswith("token_embd") else Q4_1 if "norm" not in name else F32


@pytest.mark.parametrize("case", CASES)
def test_a_file_gives_the_logits_of_its_folder(case: str, tmp_path: Path) -> None:
    architecture, options = CASES[case]
    folder = make_tiny_model(tmp_path / "folder", architecture, **options)
    torch.testing.assert_close(logits(write_gguf(folder, tmp_path / "model.gguf")), logits(folder), atol=2e-6, rtol=0)


def test_every_architecture_has_a_case() -> None:
    assert {architecture for architecture, _ in CASES.values()} == ARCHITECTURES.keys()


def test_a_scaled_rotation_is_read_from_its_tensor(tmp_path: Path) -> None:
    factors = [1.0 + number for number in range(8)]
    scaled = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors}
    folder = make_tiny_model(tmp_path / "folder", rope_parameters=scaled | {"attention_factor": 1.0})
    path = write_gguf(folder, tmp_path / "model.gguf", rope_freqs=factors)
    assert torch.equal(logits(path), logits(folder))


def test_a_quantized_file_gives_the_logits_of_its_dequantized_folder(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "folder")
    path = write_gguf(folder, tmp_path / "model.gguf", mixed_types)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() > 1:
            kind = Q8_0 if "embed" in name else Q4_1
            numbers = gguf.quants.quantize(tensor.numpy(), kind)
            tensors[name] = torch.from_numpy(gguf.quants.dequantize(numbers, kind))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(path), logits(folder))


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_dequantized_as_by_the_library(kind: str) -> None:
    data = random_blocks(kind, rows=6, blocks=3)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    values = dequantize(torch.from_numpy(data).flatten(), kind).view(6, -1)
    assert np.array_equal(values.numpy(), expected)


def random_blocks(kind: str, rows: int, blocks: int) -> NDArray[np.uint8]:
    """Blocks of random numbers with finite scales."""
    rng, num_bytes = np.random.default_rng(7), BLOCKS[kind][1]
    data = rng.integers(0, 256, (rows * blocks, num_bytes), dtype=np.uint8)
    halves = rng.normal(size=(rows * blocks, 2)).astype(np.float16).view(np.uint8)
    if kind == "Q6_K":
        data[:, -2:] = halves[:, :2]
    else:
        data[:, :2] = halves[:, :2]
        if kind.endswith(("_1", "4_K", "5_K")):
            data[:, 2:4] = halves[:, 2:]
    return data.reshape(rows, -1)


@pytest.mark.parametrize("part", [Slice(0, 32, 16), Slice(1, 32, 32), Slice(1, 16, 24)])
@pytest.mark.parametrize("kind", [F32, Q4_1])
def test_a_rank_reads_its_part(kind: gguf.GGMLQuantizationType, part: Slice, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "folder")
    path = write_gguf(folder, tmp_path / "model.gguf", lambda name: kind)
    name = "model.layers.1.self_attn.q_proj.weight"
    with CheckpointWeights(path, torch.float32, CPU) as checkpoint:
        whole = checkpoint.take(name, (64, 64))
        taken = checkpoint.take(name, (64, 64), part)
    assert torch.equal(taken, whole.narrow(part.dim, part.start, part.length))


@pytest.mark.parametrize("part", [Slice(0, 8, 16), Slice(1, 256, 256), Slice(1, 96, 288)])
@pytest.mark.parametrize("kind", INTEGER_BITS)
def test_integers_of_a_part_stand_for_its_values(kind: str, part: Slice, tmp_path: Path) -> None:
    """To the bit if a weight is a multiple of the scale; where an offset is added, up to float32's last bits."""
    name, shape = "model.layers.0.self_attn.v_proj", (32, 512)
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    data = random_blocks(kind, rows=32, blocks=512 // BLOCKS[kind][0])
    if kind.endswith(("_1", "_K")):
        data[3, :2] = 0  # a scale
    writer.add_tensor("blk.0.attn_v.weight", data, raw_dtype=gguf.GGMLQuantizationType[kind])
    write(writer)
    with CheckpointWeights(tmp_path / "model.gguf", torch.float32, CPU) as checkpoint:
        values = checkpoint.take(f"{name}.weight", shape, part)
        weights = Weights(checkpoint, Ggml(kind)) / name
        integers = Ggml(kind).expert_weight([Projection(weights, *shape, part)])
    assert (integers.bits, integers.scales.shape[1]) == (INTEGER_BITS[kind], values.shape[1] // 32)
    atol = 0.0 if kind in ("Q4_0", "Q5_0", "Q8_0") else 2e-6 * float(values.abs().max())
    torch.testing.assert_close(dequantize_int(integers), values, atol=atol, rtol=0)


def test_a_file_with_experts_of_several_types_is_loaded(tmp_path: Path) -> None:
    """Those of a layer stay integers if all of them can."""
    folder = make_tiny_model(tmp_path / "folder", "qwen3_moe", hidden_size=256, moe_intermediate_size=256)

    def kind_of(name: str) -> gguf.GGMLQuantizationType:
        return F32 if "exps" not in name or name.startswith("blk.1.ffn_down") else Q8_0 if "down" in name else Q4_1

    path = write_gguf(folder, tmp_path / "model.gguf", kind_of)
    method = read_config.from_folder(path).linear_method
    assert isinstance(method, ByModule)
    prefix = "model.layers.{}.mlp.experts.3.{}_proj"
    assert method.quantization.format_of(prefix.format(0, "down")) == GgmlFormat("Q8_0")
    assert method.quantization.format_of(prefix.format(0, "up")) == GgmlFormat("Q4_1")
    assert method.quantization.format_of(prefix.format(1, "up")) is None
    assert logits(path).isfinite().all()


def test_the_tokenizer_and_the_template_are_those_of_the_folder(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "folder")
    files = read_tokenizer_files(write_gguf(folder, tmp_path / "model.gguf"))
    ours, theirs = ModelTokenizer.load(files), ModelTokenizer.load(read_tokenizer_files(folder))
    for text in ("Hello, world", "<|im_start|>user\nÄöß 你好 🙂<|im_end|>", "", "  \t\n"):
        assert ours.tokenizer.encode(text).ids == theirs.tokenizer.encode(text).ids
    assert ours.added_tokens == theirs.added_tokens
    assert ours.templates.source == theirs.templates.source
    assert ours.config["eos_token"] == theirs.config["eos_token"]
    assert read_config.from_folder(tmp_path / "model.gguf").eos_token_ids == (EOS_TOKEN_ID,)


SPM_TOKENS = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA4>", "▁", "a", "b", "▁a", "ab", "▁ab", "\n\n", "\n"]
SPM_TYPES = [2, 3, 3, 6, 6, 1, 1, 1, 1, 1, 1, 4, 1]


@pytest.mark.parametrize(
    ("text", "prefixed", "tokens"),
    [
        ("ab a", True, ["<s>", "▁ab", "▁a"]),
        ("ab a", False, ["<s>", "ab", "▁a"]),
        ("aä", False, ["<s>", "a", "<0xC3>", "<0xA4>"]),
        ("a\n\n\nb</s>", False, ["<s>", "a", "\n\n", "\n", "b", "</s>"]),
    ],
)
def test_scores_become_merges(text: str, prefixed: bool, tokens: list[str], tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(SPM_TOKENS)
    writer.add_token_types(SPM_TYPES)
    writer.add_token_scores([-float(number) for number in range(len(SPM_TOKENS))])
    writer.add_bos_token_id(1)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(prefixed)
    write(writer)
    tokenizer = Tokenizer.from_buffer(read_tokenizer_files(tmp_path / "model.gguf")["tokenizer.json"])
    assert tokenizer.encode(text).tokens == tokens
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False).startswith("<s>")


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("model", "source"),
    [
        ("org/model-GGUF:Q4_K_M", HubModel("org/model-GGUF", "Q4_K_M")),
        ("hf.co/org/model-GGUF:Q8_0", HubModel("org/model-GGUF", "Q8_0")),
    ],
)
def test_a_type_is_named_behind_a_hub_id(model: str, source: HubModel) -> None:
    assert source_of(model) == source


def test_a_hub_id_of_gguf_files_needs_a_type() -> None:
    with pytest.raises(ValueError, match=r"several types: name one, as in org/model-GGUF:Q4_K_M"):
        source_of("org/model-GGUF")


def test_of_several_files_one_is_named(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "folder")
    (tmp_path / "files").mkdir()
    path = write_gguf(folder, tmp_path / "files" / "model-Q8_0.gguf")
    assert source_of(str(path.parent)) == source_of(str(path)) == LocalFolder(path)
    (path.parent / "mmproj-model.gguf").touch()
    assert source_of(str(path.parent)) == LocalFolder(path)
    (path.parent / "model-Q4_0.gguf").touch()
    with pytest.raises(ValueError, match=r"several GGUF files: give one of them .*: model-Q4_0.gguf, model-Q8_0.gguf"):
        source_of(str(path.parent))


def test_parts_are_one_model(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "folder")
    whole = write_gguf(folder, tmp_path / "model.gguf")
    parts = [tmp_path / "split" / f"model-0000{number}-of-00002.gguf" for number in (1, 2)]
    parts[0].parent.mkdir()
    split(whole, parts)
    assert resolve_model(str(parts[1])) == resolve_model(str(parts[0].parent)) == parts[0]
    assert torch.equal(logits(parts[0]), logits(whole))


def split(whole: Path, parts: list[Path]) -> None:
    """As llama.cpp's program does it: the first part alone has the metadata."""
    reader = gguf.GGUFReader(whole)
    for number, path in enumerate(parts):
        writer = gguf.GGUFWriter(str(path), "llama")
        if number == 0:
            for field in reader.fields.values():
                if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                    sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                    contents: Any = field.contents()
                    if contents != []:
                        writer.add_key_value(field.name, contents, field.types[0], sub_type)
        else:
            writer.kv_data = [{}]
        writer.add_uint16("split.no", number)
        for tensor in reader.tensors[number :: len(parts)]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        write(writer)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def cut_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def point(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\n")


def replace(old: bytes, new: bytes) -> Callable[[Path], None]:
    """Of equal lengths."""

    def change(path: Path) -> None:
        data = path.read_bytes()
        assert old in data
        path.write_bytes(data.replace(old, new))

    return change


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (cut, r"has [\d,]+ bytes, .* ends at [\d,]+; was it copied or downloaded in full\?"),
    "cut header": (cut_header, r"its header does not end before byte 1,000; was it copied"),
    "empty": (empty, r"is not a GGUF file: it does not begin with GGUF|does not end before byte 0"),
    "another format": (replace(b"GGUF\x03", b"GGML\x03"), "is not a GGUF file"),
    "version": (replace(b"GGUF\x03", b"GGUF\x01"), "version 1 of GGUF; supported: 2 and 3"),
    "architecture": (replace(b"llama", b"mamba"), "architecture mamba is not supported as GGUF; supported: llama, "),
    "tensor": (replace(b"blk.1.attn_k.", b"blk.1.attn_x."), "the tensor blk.1.attn_x.weight is not one of Llama"),
    "pattern": (replace(b"gpt-2", b"gpt-9"), "divides texts by the pattern gpt-9, which is not known; give the folder"),
    "tokenizer": (replace(b"gpt2", b"bert"), "is of the kind bert, which is not supported; give the folder"),
    "pointer": (point, "pointer of Git LFS"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_read_is_named(fault: str, tmp_path: Path) -> None:
    path = write_gguf(make_tiny_model(tmp_path / "folder"), tmp_path / "model.gguf")
    change, sentence = FAULTS[fault]
    change(path)
    with pytest.raises(ValueError, match=sentence):
        check_start(EngineConfig(model=str(path), device="cpu"))


def test_damaged_headers_are_refused_or_read(tmp_path: Path) -> None:
    """With some of their bytes changed."""
    path = write_gguf(make_tiny_model(tmp_path / "folder", "lfm2"), tmp_path / "model.gguf")
    data, end, rng = path.read_bytes(), min(each.start for each in read_header(path).tensors), random.Random(3)
    refused = 0
    for _ in range(200):
        damaged = bytearray(data)
        for place in rng.sample(range(end), rng.choice((1, 1, 3))):
            damaged[place] = rng.choice((0, 255, damaged[place] ^ 1 << rng.randrange(8)))
        path.write_bytes(damaged)
        try:
            check_start(EngineConfig(model=str(path), device="cpu"))
        except ValueError:
            refused += 1
    assert 0 < refused < 200


def test_types_that_are_not_supported_are_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    kind = gguf.GGMLQuantizationType.IQ4_XS
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((2, 136), np.uint8), raw_dtype=kind)
    write(writer)
    with pytest.raises(ValueError, match=r"blk.0.attn_q.weight is stored as IQ4_XS, .*; take .* Q4_K_M or Q8_0"):
        read_header(tmp_path / "model.gguf")


def test_a_start_with_a_file_is_checked(tmp_path: Path) -> None:
    path = write_gguf(make_tiny_model(tmp_path / "folder"), tmp_path / "model.gguf", mixed_types)
    check_start(EngineConfig(model=str(path), device="cpu"))
    assert json.loads(read_tokenizer_files(path)["generation_config.json"]) == {"eos_token_id": [EOS_TOKEN_ID]}
