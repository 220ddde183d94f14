"""What is wrong with a model's folder or its options is said before torch is imported, in one line."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from transformers import Mamba2Config

from proa.lora_module import LoraModule
from proa_engine.config import EngineConfig
from proa_engine.engine_parts import load_engine
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.models import read_config
from proa_engine.preflight import check_start
from support.odd_tokenizer_files import ODD_FILES, OddFile
from support.tiny_models import make_tiny_model

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
Break = Callable[[Path], object]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "good")


def remove(name: str) -> Break:
    return lambda folder: (folder / name).unlink()


def write(name: str, text: str) -> Break:
    return lambda folder: (folder / name).write_text(text)


def rename(name: str, other: str) -> Break:
    return lambda folder: (folder / name).rename(folder / other)


def configure(**fields: Any) -> Break:
    def apply(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return apply


def link(name: str, target: str) -> Break:
    def apply(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return apply


def unset(name: str) -> Break:
    def apply(folder: Path) -> None:
        fields = json.loads((folder / "config.json").read_text())
        del fields[name]
        (folder / "config.json").write_text(json.dumps(fields))

    return apply


def cut(name: str) -> Break:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-10])


def edit_header(change: Callable[[dict[str, Any]], object], *, name: str = "model.safetensors") -> Break:
    """Rewrite the header of a safetensors file, and leave its tensors as they are."""

    def apply(folder: Path) -> None:
        data = (folder / name).read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        change(header)
        text = json.dumps(header).encode()
        (folder / name).write_bytes(len(text).to_bytes(8, "little") + text + data[end:])

    return apply


def rename_tensors(old: str, new: str) -> Break:
    def change(header: dict[str, Any]) -> None:
        for name in [name for name in header if old in name]:
            header[name.replace(old, new)] = header.pop(name)

    return edit_header(change)


def edit_entry(name: str, **fields: Any) -> Break:
    return edit_header(lambda header: header[name].update(fields))


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def nest(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.mkdir()
    folder.with_name("moved").rename(folder / "inner")


def both(*breaks: Break) -> Break:
    return lambda folder: [each(folder) for each in breaks]


def put_folder(name: str) -> Break:
    return both(remove(name), lambda folder: (folder / name).mkdir())


LARGER_VOCABULARY = json.dumps({"model": {"type": "BPE", "vocab": {str(each): each for each in range(1000)}}})

# What is wrong with the folder, and a part of the sentence.
FOLDERS: Mapping[str, tuple[Break, str]] = {
    "empty": (empty, "it is empty; is the volume mounted, and the download complete?"),
    "model is in a folder of the folder": (nest, "it has no config.json; did you mean"),
    "adapter": (rename("config.json", "adapter_config.json"), "it is a LoRA adapter; give the base model as model"),
    "GGUF that is cut": (
        both(empty, write("model-q4.gguf", "GGUF")),
        "model-q4.gguf is not a readable GGUF file: its header does not end before byte 4; was it copied",
    ),
    "safetensors named GGUF": (
        rename("model.safetensors", "model-q4.gguf"),
        "model-q4.gguf is not a GGUF file: it does not begin with GGUF",
    ),
    "config is a folder": (put_folder("config.json"), "config.json is a folder, not a file"),
    "config is empty": (write("config.json", ""), "config.json is not valid JSON: it is empty"),
    "config is cut": (cut("config.json"), "config.json is not valid JSON"),
    "config is a pointer": (write("config.json", LFS_POINTER), "config.json is a pointer of Git LFS"),
    "config without a size": (configure(num_hidden_layers=None), "config.json lacks the field 'num_hidden_layers'"),
    "config lacks a size": (unset("hidden_size"), "config.json lacks the field 'hidden_size'"),
    "no architectures": (configure(architectures=None), "architectures in config.json must be a list with a name"),
    "unknown architecture": (
        configure(architectures=["FooForCausalLM"]),
        "architecture FooForCausalLM is not supported; docs/models.md lists what is supported",
    ),
    "misspelt architecture": (
        configure(architectures=["LamaForCausalLM"]),
        "architecture LamaForCausalLM is not supported (did you mean LlamaForCausalLM?)",
    ),
    "architecture with code in the folder": (
        configure(architectures=["MyForCausalLM"], auto_map={"AutoModelForCausalLM": "modeling_my.MyForCausalLM"}),
        "its code is in the model's folder (auto_map in config.json), and code of checkpoints is never run; take a ver",
    ),
    "unknown quantization": (
        configure(quantization_config={"quant_method": "bitsandbytes"}),
        "quantization bitsandbytes is not supported; supported: none, auto-round, awq, compressed-tensors, fp8, "
        "gguf, gptq, modelopt, modelopt_fp4, mxfp4; take the model in awq or",
    ),
    "quantization in other bits": (
        configure(quantization_config={"quant_method": "awq", "bits": 8}),
        "quantization with bits 8 is not supported; supported: 4",
    ),
    "unknown type": (configure(dtype="float64"), "dtype float64 is not supported; supported: float32"),
    "no config": (remove("config.json"), "is not a model folder: it has no config.json"),
    "config is not JSON": (write("config.json", "{"), "config.json is not valid JSON"),
    "config is a list": (write("config.json", "[]"), "config.json must hold a JSON object"),
    "config is nested": (write("config.json", "[" * 100_000), "config.json is not valid JSON"),
    "generation config is not JSON": (write("generation_config.json", "?"), "generation_config.json is not valid JSON"),
    "end token is a text": (configure(eos_token_id="</s>"), "eos_token_id in config.json must be a token id"),
    "no architecture": (configure(architectures=[]), "architectures in config.json must be a list with a name"),
    "architectures is a text": (
        configure(architectures="Llama"),
        "architectures in config.json must be a list with a name",
    ),
    "size is a text": (configure(hidden_size="64"), "hidden_size in config.json must be a whole number above zero"),
    "no heads": (configure(num_attention_heads=0), "num_attention_heads in config.json must be a whole number above"),
    "rope is a text": (configure(rope_scaling="yarn"), "rope_scaling in config.json must be an object, got 'yarn'"),
    "text config is a text": (configure(text_config="x"), "text_config in config.json must be an object"),
    "no tokenizer": (remove("tokenizer.json"), "has no tokenizer.json; give the folder of another one"),
    "another tokenizer": (
        rename("tokenizer.json", "tokenizer.model"),
        "tokenizer.model cannot be converted to tokenizer.json",
    ),
    "tokenizer is no tokenizer": (write("tokenizer.json", "{}"), "tokenizer.json is not a tokenizer"),
    "tokenizer is a pointer": (write("tokenizer.json", LFS_POINTER), "tokenizer.json is a pointer of Git LFS"),
    "tokenizer config is not JSON": (write("tokenizer_config.json", ""), "tokenizer_config.json is not valid JSON"),
    "tokenizer is cut": (cut("tokenizer.json"), "tokenizer.json is not valid JSON"),
    "tokenizer is of another model": (
        write("tokenizer.json", LARGER_VOCABULARY),
        "has 1,000 tokens, but the model has vocab_size 259: it is the tokenizer of another model",
    ),
    "no weights": (remove("model.safetensors"), "no *.safetensors weights: only its other files were copied"),
    "weights in pickle": (
        rename("model.safetensors", "pytorch_model.bin"),
        "pytorch_model.bin is in PyTorch's pickle format, which can run code when it is loaded; take a version of the",
    ),
    "header is no JSON": (
        write("model.safetensors", "\x02\0\0\0\0\0\0\0{]"),
        "model.safetensors is not a readable safetensors file: its header is invalid",
    ),
    "tensor is behind the file's end": (
        edit_entry("model.norm.weight", data_offsets=[10**9, 10**9 + 256]),
        "its header says 1,000,0",
    ),
    "tensor has fewer bytes than its shape": (
        edit_entry("model.norm.weight", shape=[65]),
        "model.norm.weight has 256 bytes, which are not those of F32 [65]",
    ),
    "weights are of another vocabulary": (
        configure(vocab_size=300),
        "model.embed_tokens.weight has shape [259, 64], but vocab_size is 300",
    ),
    "weights are of another width": (configure(hidden_size=128), "has shape [259, 64], but hidden_size is 128"),
    "weights have fewer layers": (
        configure(num_hidden_layers=4),
        "num_hidden_layers is 4, but layers 2, 3 have no tensors",
    ),
    "weights of another model": (
        rename_tensors("model.", "transformer."),
        "are not those of its config.json: model.embed_tokens.weight is missing, which LlamaForCausalLM has",
    ),
    "quantized weights without a quantization": (
        edit_entry("model.layers.0.mlp.up_proj.weight", dtype="I32"),
        "model.layers.0.mlp.up_proj.weight is stored as I32, so it is quantized, but there is no quantization_config",
    ),
    "weights are cut": (cut("model.safetensors"), "was it copied or downloaded in full?"),
    "weights are a pointer": (write("model.safetensors", LFS_POINTER), "model.safetensors is a pointer of Git LFS"),
    "weights are a page": (write("model.safetensors", "<html>…</html>"), "model.safetensors is not a readable"),
    "weights are empty": (write("model.safetensors", ""), "model.safetensors is not a readable safetensors file"),
    "index names absent files": (
        write("model.safetensors.index.json", '{"weight_map": {"a": "b.safetensors"}}'),
        "lacks 1 of 1 files that its index names: b.safetensors",
    ),
    "index names a broken link": (
        both(
            write("model.safetensors.index.json", '{"weight_map": {"a": "b.safetensors"}}'),
            link("b.safetensors", "../../blobs/0"),
        ),
        "b.safetensors is a link to ../../blobs/0, which does not exist; of a model in the hub's cache, give the id",
    ),
    "weights are a broken link": (link("model.safetensors", "../../blobs/0"), "model.safetensors is a link to ../../"),
    "config is a broken link": (link("config.json", "../../blobs/0"), "config.json is a link to ../../blobs/0, which"),
    "tokenizer is a broken link": (link("tokenizer.json", "../../blobs/0"), "tokenizer.json is a link to ../../blobs"),
    "type of numbers that is not loaded": (
        edit_entry("model.norm.weight", dtype="C64", shape=[32]),
        "model.safetensors: model.norm.weight is stored as C64; supported: BOOL, U8,",
    ),
    "a thousand layers": (configure(num_hidden_layers=1000), "but layers 2, 3, 4, 5, 6, … have no tensors"),
    "epsilon is a text": (configure(rms_norm_eps="1e-6"), "rms_norm_eps in config.json must be a number, got '1e-6'"),
    "rotary base is a text": (
        configure(rope_parameters={"rope_type": "default", "rope_theta": "1e4"}),
        "rope_theta in config.json must be a number, got '1e4'",
    ),
    "quantization in groups of none": (
        configure(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 0}),
        "quantization with group_size 0 is not supported; supported: -1, or a multiple of 32",
    ),
    "quantization except for a number": (
        configure(quantization_config={"quant_method": "fp8", "modules_to_not_convert": [3]}),
        "modules_to_not_convert in quantization_config must be a list of names, got [3]",
    ),
    "index without a map": (write("model.safetensors.index.json", "{}"), "index.json has no weight_map"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_bad_folder_is_refused_with_the_reason(name: str, good: Path, tmp_path: Path) -> None:
    spoil, sentence = FOLDERS[name]
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    spoil(folder)

    with pytest.raises(ValueError, match=re.escape(sentence)) as raised:
        check_start(EngineConfig(model=str(folder)))

    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"model": "/nowhere/at/all"}, "model folder /nowhere/at/all does not exist: / has no nowhere"),
        ({"model": "./nowhere"}, "model folder ./nowhere does not exist"),
        ({"model": ""}, "model must not be empty"),
        ({"model": "~no-such-user/model"}, "~no-such-user/model cannot be read: there is no such user"),
        (
            {"model": "builtin", "generation_config": "~no-such-user"},
            "generation_config ~no-such-user is neither auto nor",
        ),
        ({"model": "s3://bucket/model", "revision": "v2"}, "revision v2: s3://bucket/model has no revisions"),
        ({"model": "http://host/model.tar"}, "http://host/model.tar is a URL, which is not supported: download the"),
        ({"model": "https://huggingface.co/a/b/tree/main"}, "is a page of the hub: give the id a/b"),
        ({"model": "hf://a/b"}, "is written as an id of the hub, without hf://"),
        ({"model": "builtin", "max_model_len": 1_000_000}, "max_model_len 1000000 is more than the model's"),
        ({"model": "builtin", "tensor_parallel_size": 64}, "are fewer than tensor_parallel_size (64), which can be at"),
        ({"model": "builtin", "quantization": "awq"}, "quantization awq needs a checkpoint of that format"),
        ({"model": __file__}, "test_start_errors.py is a file; give the folder"),
        ({"model": "not a model!"}, "not a model! is neither a folder nor a hub id"),
        ({"model": "builtin", "tokenizer": "/nowhere"}, "model folder /nowhere does not exist"),
        (
            {"model": "builtin", "enable_lora": True, "lora_modules": ["a=/nowhere"]},
            "lora_modules: there is no adapter at /nowhere",
        ),
        (
            {"model": "builtin", "speculative_config": SpeculativeConfig(method="eagle3", model="/nowhere")},
            "speculative_config: model folder /nowhere does not exist",
        ),
    ],
)
def test_bad_options_are_refused_with_the_reason(options: dict[str, Any], sentence: str) -> None:
    modules = tuple(LoraModule.parse(each) for each in options.pop("lora_modules", ()))

    with pytest.raises(ValueError, match=re.escape(sentence)):
        check_start(EngineConfig.from_options(**options, lora_modules=modules))


CONFIGURATIONS = {name: odd for name, odd in ODD_FILES.items() if odd.name != "tokenizer.json"}


@pytest.mark.parametrize("odd", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_an_odd_file_of_the_tokenizer_works_or_is_named(
    odd: OddFile, good: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(good, tmp_path / "model")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / odd.name).write_bytes(odd.data)
    if odd.refusal is None:
        check_start(EngineConfig(model=str(folder)))
    else:
        with pytest.raises(ValueError, match=re.escape(str(folder)) + r"[^\n]*" + re.escape(odd.name)):
            check_start(EngineConfig(model=str(folder)))
    assert odd.chat_error is None or odd.chat_error in caplog.text


TOKENIZERS = {name: odd for name, odd in ODD_FILES.items() if odd.name == "tokenizer.json" and odd.refusal is not None}


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with an embedding for each token of the odd tokenizers."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "roomy", vocab_size=400)


@pytest.mark.parametrize("odd", TOKENIZERS.values(), ids=TOKENIZERS)
def test_an_odd_tokenizer_ends_the_start_with_its_name(odd: OddFile, roomy: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(roomy, tmp_path / "model")
    (folder / odd.name).write_bytes(odd.data)
    with pytest.raises(ValueError, match=re.escape(str(folder)) + r"[^\n]*tokenizer\.json[^\n]*\Z"):
        load_engine(EngineConfig(model=str(folder), device="cpu"), lambda line: None)


def test_a_good_folder_passes(good: Path) -> None:
    check_start(EngineConfig(model=str(good)))
    check_start(EngineConfig(model="builtin"))


def test_without_a_tokenizer_token_ids_are_served_if_asked_for(good: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(good, tmp_path / "model")
    remove("tokenizer.json")(folder)

    check_start(EngineConfig(model=str(folder), skip_tokenizer_init=True))


def test_dummy_weights_need_no_files(good: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(good, tmp_path / "model")
    remove("model.safetensors")(folder)

    check_start(EngineConfig(model=str(folder), load_format="dummy"))


@pytest.mark.parametrize("options", ["model='/nowhere'", "model='builtin', device='cuda'"])
def test_a_start_that_cannot_work_imports_no_torch(options: str) -> None:
    script = (
        "import ctypes, sys\n"
        "def absent(name): raise OSError(name + ' is not there')\n"
        "ctypes.CDLL = absent\n"
        "from proa_engine.engine_parts import load_engine\n"
        "from proa_engine.config import EngineConfig\n"
        f"try: load_engine(EngineConfig({options}), print)\n"
        "except ValueError as error: print(error)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    assert "does not exist" in done.stdout or "needs an NVIDIA driver" in done.stdout


@pytest.mark.parametrize(("device", "is_refused"), [("cuda", True), ("auto", True), ("cpu", False)])
def test_torch_for_amd_is_refused_before_it_is_imported(
    device: Literal["cuda", "auto", "cpu"], is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise AssertionError('imported')")
    (tmp_path / "torch/version.py").write_text("__version__ = '2.13.0+rocm7.1'\nhip = '7.1.25424'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    if is_refused:
        with pytest.raises(
            ValueError, match=r"torch 2.13.0\+rocm7.1 is built for AMD GPUs \(ROCm 7.1.25424\), which are"
        ):
            check_start(EngineConfig(model="builtin", device=device))
    else:
        check_start(EngineConfig(model="builtin", device=device))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"hidden_size": None}, "config.json lacks the field 'hidden_size'"),
        ({"architectures": ["FooForCausalLM"]}, "architecture FooForCausalLM is not supported"),
        (
            {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 30},
            "transformers cannot make BertModel of config.json: The hidden size (30) is not a multiple",
        ),
    ],
)
def test_what_only_the_architecture_knows_is_one_sentence_too(
    config: dict[str, Any], sentence: str, good: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(good, tmp_path / "model")
    fields = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({name: each for name, each in fields.items() if each is not None}))

    with pytest.raises(ValueError, match=re.escape(sentence)):
        load_engine(EngineConfig(model=str(folder), device="cpu"), lambda line: None)


def test_a_tokenizer_that_the_library_cannot_read_ends_the_start(good: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(good, tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["type"] = "Newer"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))

    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read: .*did not match any variant") as raised:
        load_engine(EngineConfig(model=str(folder), device="cpu"), lambda line: None)
    assert "\n" not in str(raised.value)


def test_infinite_numbers_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    config = Mamba2Config(
        num_hidden_layers=1, hidden_size=32, head_dim=16, num_heads=4, architectures=["Mamba2ForCausalLM"]
    )
    config.save_pretrained(tmp_path)
    assert "Infinity" in (tmp_path / "config.json").read_text()

    assert read_config.from_folder(tmp_path).model_type == "mamba2"
