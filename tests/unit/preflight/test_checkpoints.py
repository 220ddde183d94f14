"""What headers of weights and a tokenizer's file tell, and what an engine starts with in spite of a warning."""

import json
import logging
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from proa_engine.config import EngineConfig
from proa_engine.kernels.products.linear import HALF_MIN_NUMEL
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models.loader import load_model
from proa_engine.models.quantization.formats import Quantization
from proa_engine.models.quantization.read import read_quantization
from proa_engine.models.read_config import from_folder
from proa_engine.models.registry import MODULES, REQUIRED_FIELDS, model_class
from proa_engine.models.transformers_names import causal_lm_names, parse_names
from proa_engine.preflight import check_start
from proa_engine.preflight.weights import HALF_SIZE, check_experts, least_bytes
from proa_engine.sources.folders import read_config, text_fields, weight_files
from proa_engine.sources.tensors import ITEM_BYTES, Tensor
from proa_engine.sources.weight_headers import read_header, read_headers
from support.quantized_models import FP8_FORMATS, INT_FORMATS, SIZES, write_quantized
from support.renamed_models import STORED, make_renamed_model
from support.tiny_models import make_tiny_model

QUANTIZED_FOLDER = Path(__file__).parents[2] / "data/quantized"
QUANTIZED = sorted(folder.name for folder in QUANTIZED_FOLDER.iterdir() if folder.is_dir())


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "good")


def edit_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_headers_are_those_that_safetensors_writes(tmp_path: Path) -> None:
    types = (torch.bool, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32)
    save_file(
        {str(each): torch.zeros(3, 5, dtype=each) for each in types}, tmp_path / "a.safetensors", {"format": "pt"}
    )

    tensors = read_header(tmp_path / "a.safetensors")

    assert {name: ITEM_BYTES[each.dtype] for name, each in tensors.items()} == {str(t): t.itemsize for t in types}
    assert {each.shape for each in tensors.values()} == {(3, 5)}


def test_of_weights_only_headers_are_read(good: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(good, tmp_path / "model")
    path = folder / "model.safetensors"
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    with path.open("wb") as file:  # all tensors in a hole of the file
        file.write(data[:header])
        file.truncate(len(data))

    check_start(EngineConfig(model=str(folder)))


def loaded_bytes(folder: Path) -> int:
    model = load_model(
        folder,
        from_folder(folder),
        dtype=torch.float32,
        device=torch.device("cpu"),
        parallel=ParallelContext(),
        report=lambda line: None,
    )
    return sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())


def estimate(folder: Path, dtype: str = "float32", quantization: str | None = None, *, on_cpu: bool = True) -> int:
    tensors, fields = read_headers(weight_files(folder)), text_fields(read_config(folder))
    stored_as = read_quantization(fields.get("quantization_config"), quantization)
    return least_bytes(tensors, fields, dtype=dtype, quantization=stored_as, on_cpu=on_cpu)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gemma3_text", "qwen3_next"])
def test_memory_of_weights_is_not_overestimated(architecture: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, architecture)
    loaded, least = loaded_bytes(folder), estimate(folder)

    assert 0.3 * loaded < least <= loaded  # a small weight is held twice
    assert estimate(folder, "bfloat16") == estimate(folder, "bfloat16", "fp8") == least // 2
    assert estimate(folder, "bfloat16", "fp8", on_cpu=False) == least // 4


def test_large_weights_are_counted_as_float16_may_hold_them(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, hidden_size=512, intermediate_size=512, num_hidden_layers=1)
    tensors = {name: each.half() for name, each in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    loaded, least = loaded_bytes(folder), estimate(folder)

    assert HALF_SIZE == HALF_MIN_NUMEL == tensors["model.layers.0.mlp.up_proj.weight"].numel()
    assert 0.25 * loaded < least <= loaded  # without AVX-512 they are held in float32


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_are_counted_as_they_are_held(name: str) -> None:
    folder = QUANTIZED_FOLDER / name
    loaded, least = loaded_bytes(folder), estimate(folder)

    assert 0.25 * loaded < least <= loaded  # a small weight is held twice, and of mixed bits the most count
    assert estimate(folder, on_cpu=False) < 0.7 * least


def test_layers_that_are_not_loaded_take_no_memory() -> None:
    tensors = {
        "model.embed_tokens.weight": Tensor("BF16", (10, 4), 0),
        "model.layers.0.mlp.weight": Tensor("I32", (8,), 0),
        "model.layers.1.mlp.weight": Tensor("BF16", (100, 100), 0),  # predicts further tokens
        "lm_head.weight": Tensor("BF16", (10, 4), 0),
    }

    fields = {"num_hidden_layers": 1}
    least = least_bytes(tensors, fields, dtype="float16", quantization=Quantization(None), on_cpu=False)
    assert least == 10 * 4 * 2 + 8 * 4


@pytest.mark.parametrize("name", ["fp8, blocks", "awq"])
def test_quantized_folders_pass(name: str, tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", **SIZES)
    quantized, _ = write_quantized(source, tmp_path, (FP8_FORMATS | INT_FORMATS)[name])

    check_start(EngineConfig(model=str(quantized)))


@pytest.mark.parametrize(
    ("name", "part", "fields", "reason"),
    [
        ("gptqmodel-experts-4bit", "", {"desc_act": True}, "experts quantized by gptq with desc_act or actorder group"),
        (
            "llmcompressor-experts-w4a16-asym",
            "weights",
            {"actorder": "group"},
            "experts quantized by compressed-tensors with desc_act or actorder group",
        ),
        (
            "llmcompressor-experts-w8a8",
            "input_activations",
            {"symmetric": False},
            "experts with asymmetric activations in 8-bit integers are not supported",
        ),
    ],
)
def test_experts_of_a_format_without_experts_are_refused(
    name: str, part: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(QUANTIZED_FOLDER / name, tmp_path / "model")
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    (quantization["config_groups"]["group_0"][part] if part else quantization).update(fields)
    edit_json(folder / "config.json", quantization_config=quantization)

    with pytest.raises(ValueError, match=rf"experts\.0\.\w+: {reason}"):
        check_start(EngineConfig(model=str(folder)))


@pytest.mark.parametrize(
    ("fields", "is_refused"),
    [({"quant_method": "fp8"}, True), ({"quant_method": "fp8", "ignored_layers": ["experts"]}, False)],
)
def test_quantized_experts_in_one_tensor_are_refused(fields: dict[str, Any], is_refused: bool, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "gpt_oss")
    tensors, config = read_headers(weight_files(folder)), read_config(folder)
    sentence = r"layers\.0\.mlp\.experts\.\w+: quantized experts in one tensor are supported only in gpt-oss's mxfp4"

    with pytest.raises(ValueError, match=sentence) if is_refused else nullcontext():
        check_experts(tensors, config, read_quantization(fields, None))


def test_no_architecture_has_a_default_for_a_required_field() -> None:
    assert not [name for name in MODULES if not model_class(name).defaults.keys().isdisjoint(REQUIRED_FIELDS)]


def test_names_of_transformers_are_those_of_the_library() -> None:
    assert causal_lm_names() == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    assert not parse_names("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = load()")


@pytest.mark.parametrize("architecture", STORED)
def test_other_names_of_tensors_and_fields_pass_and_are_counted(architecture: str, tmp_path: Path) -> None:
    folder, same = make_renamed_model(tmp_path, architecture)
    check_start(EngineConfig(model=str(folder), max_model_len=512))
    with pytest.raises(ValueError, match="max_model_len 513"):
        check_start(EngineConfig(model=str(folder), max_model_len=513))
    assert estimate(folder) == estimate(same)
    config = folder / "config.json"
    for name in {"num_layers", "num_hidden_layers"} & json.loads(config.read_text()).keys():
        edit_json(config, **{name: 3})
    with pytest.raises(ValueError, match="layers 2 have no tensors"):
        check_start(EngineConfig(model=str(folder)))


def test_an_architecture_that_transformers_runs_passes(good: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(good, tmp_path / "model")
    edit_json(folder / "config.json", architectures=["StableLmForCausalLM"], model_type="stablelm")

    check_start(EngineConfig(model=str(folder)))


def test_a_missing_chat_template_is_only_a_warning(
    good: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(good, tmp_path / "model")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edit_json(folder / "tokenizer_config.json", chat_template=None)

    with caplog.at_level(logging.WARNING):
        check_start(EngineConfig(model=str(good)))
        assert not caplog.records
        check_start(EngineConfig(model=str(folder)))

    assert "has no chat template: chat requests are rejected unless" in caplog.text


def test_added_tokens_may_be_beyond_the_vocabulary(good: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(good, tmp_path / "model")
    edit_json(folder / "tokenizer.json", added_tokens=[{"id": 10_000, "content": "<image>"}])

    check_start(EngineConfig(model=str(folder)))


def test_a_file_that_may_not_be_read_is_named(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shutil.copytree(good, tmp_path / "model")

    def refuse(path: Path, mode: str) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"config\.json cannot be read: Permission denied"):
        check_start(EngineConfig(model=str(folder)))
