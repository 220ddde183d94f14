"""Find the folder of a model or an adapter, and check its files. Does not import torch, which takes seconds.

Raises ValueError or FileNotFoundError with a sentence for the user, for adapters LoraNotFound.
"""

import ctypes
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proa.tokenizer_files import read_tokenizer_files as read_files
from proa_engine.builtin import builtin_adapter_folder, builtin_model_folder
from proa_engine.config import EngineConfig, LoadFormat
from proa_engine.core.lora_store import LoraNotFound
from proa_engine.models.registry import check_architecture

CONFIG_FILE_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt"]
WEIGHT_FILE_PATTERNS = ["*.safetensors"]
LORA_CONFIG_FILE = "adapter_config.json"
LORA_WEIGHTS_FILE = "adapter_model.safetensors"
BUILTIN_LORA = "builtin:"
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_OBJECTS = ("text_config", "vision_config", "quantization_config", "rope_parameters", "rope_scaling")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_LFS_POINTER = b"version https://git-lfs"
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


def check_model(config: EngineConfig) -> None:
    """Check what can be checked before torch is imported: the device, the folders of model, tokenizer and adapters, and
    that their files are there and can be read. Downloads what is on the hub."""
    if config.device == "cuda":
        check_cuda()
    folder = resolve_model(config.model, config.revision, config.load_format)
    check_architecture(read_config(folder))
    read_generation_config(folder)
    if config.load_format != "dummy":
        for path in weight_files(folder):
            _check_safetensors(path)
    if not config.skip_tokenizer_init:
        check_tokenizer(resolve_tokenizer(config))
    for module in config.lora_modules:
        try:
            adapter = resolve_lora(module.path)
        except LoraNotFound as error:
            raise ValueError(f"lora_modules: {error}") from error
        for name in (LORA_CONFIG_FILE, LORA_WEIGHTS_FILE):
            if not (adapter / name).exists():
                raise ValueError(f"lora_modules: there is no adapter at {adapter}: {name} is missing")


def resolve_model(model: str, revision: str | None = None, load_format: LoadFormat = "auto") -> Path:
    """Return the folder of `model`: "builtin", a folder's path, or a Hugging Face hub id, which is downloaded.

    If `load_format` is "dummy", weights are not downloaded.
    """
    if model == "builtin":
        return builtin_model_folder()
    if _URL.match(model):
        raise ValueError(f"model {model} is a URL, which is not supported; download it and give the folder")
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"model {model} is a file; give the folder with config.json and *.safetensors")
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ValueError(f"model folder {model} does not exist")
    weights = [] if load_format == "dummy" else WEIGHT_FILE_PATTERNS
    return _download(model, revision, CONFIG_FILE_PATTERNS + weights)


def resolve_tokenizer(config: EngineConfig) -> Path:
    """Return the folder of the tokenizer. A tokenizer of its own is downloaded without weights."""
    if config.tokenizer is None:
        return resolve_model(config.model, config.revision, config.load_format)
    return resolve_model(config.tokenizer, config.revision, "dummy")


def resolve_lora(path: str) -> Path:
    """Return the folder of an adapter: "builtin:NAME" for one of the built-in model, a folder's path, or a Hugging Face
    hub id, which is downloaded. Raises LoraNotFound."""
    try:
        folder = Path(path).expanduser()
        if path.startswith(BUILTIN_LORA):
            folder = builtin_adapter_folder(path.removeprefix(BUILTIN_LORA))
        if folder.is_dir():
            return folder
        if path.count("/") == 1 and not path.startswith((BUILTIN_LORA, ".", "/", "~")):
            return _download(path, None, [LORA_CONFIG_FILE, LORA_WEIGHTS_FILE])
    except (ValueError, RuntimeError, OSError) as error:  # also of a path that is too long, or in no user's home
        raise LoraNotFound(str(error)) from error
    raise LoraNotFound(f"there is no adapter at {path}")


def read_config(folder: Path) -> dict[str, Any]:
    """The fields of config.json, of which those that all architectures share have the right types."""
    config = read_json(folder / "config.json")
    if config is None:
        raise FileNotFoundError(f"{folder} is not a model folder: it has no config.json")
    for fields in (config, config.get("text_config")):
        _check_types(fields or {})
    return config


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The fields of generation_config.json, none if there is no such file."""
    fields = read_json(folder / "generation_config.json") or {}
    _check_eos(fields, "generation_config.json")
    return fields


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file."""
    if not path.is_file():
        return None
    _refuse_lfs_pointer(path)
    try:
        fields = json.loads(path.read_bytes(), object_hook=_decode_float)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return fields


def check_tokenizer(folder: Path) -> None:
    """Check that the tokenizer's files are there and hold JSON. Its vocabulary is not read."""
    tokenizer = read_json(folder / "tokenizer.json")
    if tokenizer is None:
        others = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (folder / name).exists()]
        hint = (
            f"convert its {others[0]} with transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…)"
            if others
            else "give the folder of another one as tokenizer, or set skip_tokenizer_init to work with token ids alone"
        )
        raise ValueError(f"{folder} has no tokenizer.json; {hint}")
    if "model" not in tokenizer:
        raise ValueError(f"{folder / 'tokenizer.json'} is not a tokenizer: it has no field model")
    read_json(folder / "tokenizer_config.json")


def read_tokenizer_files(folder: Path | None) -> dict[str, bytes]:
    """Return the tokenizer's files by name. Empty without a folder, or without a tokenizer.json in it."""
    files = {} if folder is None else read_files(folder)
    return files if "tokenizer.json" in files else {}


def weight_files(folder: Path) -> list[Path]:
    """The *.safetensors files that the index lists, because a folder may hold others; without an index, all of them."""
    index = read_json(folder / "model.safetensors.index.json")
    if index is not None:
        if not isinstance(index.get("weight_map"), Mapping):
            raise ValueError(f"{folder / 'model.safetensors.index.json'} has no weight_map")
        names = sorted(set(index["weight_map"].values()))
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise FileNotFoundError(f"{folder} lacks files that its index names: {', '.join(absent)}")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no *.safetensors weights (other formats are not supported)")
    return paths


def check_cuda() -> None:
    """Raise ValueError if the machine has no NVIDIA driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ValueError(
            f"device cuda needs an NVIDIA driver, and there is none here ({error}); a container must be given the GPU"
        ) from error


def _check_types(fields: Any) -> None:
    if not isinstance(fields, dict):
        raise ValueError(f"text_config in config.json must be an object, got {fields!r}")
    for name in _OBJECTS:
        if not isinstance(fields.get(name), dict | None):
            raise ValueError(f"{name} in config.json must be an object, got {fields[name]!r}")
    for name in _SIZES:
        size = fields.get(name)
        if size is None or isinstance(size, list):  # a list: by layer
            continue
        # Models whose layers all have experts may say that the size of the others is 0.
        if type(size) is not int or size < (name != "intermediate_size"):
            raise ValueError(f"{name} in config.json must be a whole number above zero, got {size!r}")
    _check_eos(fields, "config.json")


def _check_eos(fields: Mapping[str, Any], file: str) -> None:
    eos = fields.get("eos_token_id")
    if not all(type(each) is int for each in (eos if isinstance(eos, list) else [eos]) if each is not None):
        raise ValueError(f"eos_token_id in {file} must be a token id or a list of them, got {eos!r}")


def _check_safetensors(path: Path) -> None:
    """Check that the file has the length that its header says. safetensors would check that too, but imports torch or
    NumPy and reads the header into objects."""
    _refuse_lfs_pointer(path)
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length if length <= min(size, _MAX_HEADER_BYTES) else 0))
        tensors = [each for name, each in header.items() if name != "__metadata__"]
        end = max((tensor["data_offsets"][1] for tensor in tensors), default=0)
    except (ValueError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is not a readable safetensors file: its header is invalid") from error
    if 8 + length + end != size:
        raise ValueError(
            f"{path} is not a readable safetensors file: it has {size:,} bytes, its header says {8 + length + end:,}; "
            "was it copied or downloaded in full?"
        )


def _refuse_lfs_pointer(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ValueError(f"{path} is a pointer of Git LFS, not the file itself; get the files with `git lfs pull`")


def _decode_float(value: dict[str, Any]) -> Any:
    """transformers writes infinite numbers and NaN, which JSON has not, as {"__float__": "Infinity"}."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def _download(model: str, revision: str | None, patterns: list[str]) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except HFValidationError as error:
        raise ValueError(f"{model} is neither a folder nor a hub id: {error}") from error
    except GatedRepoError as error:
        raise ValueError(f"{model} is gated: accept its terms on the hub, and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"{model} is neither a folder here nor on the hub; a private one needs HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{model} has no revision {revision} on the hub") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx.HTTPError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{model} is not a folder here and could not be downloaded from the hub; give a folder, or check the id, "
            f"the network and HF_TOKEN: {reason}"
        ) from error
