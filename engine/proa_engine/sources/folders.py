"""Read the files of a model's folder: the JSON files, checked as far as all architectures share their fields, and which
files have the weights. Does not import torch, which takes seconds.

Raises ValueError with a sentence for the user.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proa.tokenizer_files import CONVERTED_FILES, FILE_NAMES, MAX_DEPTH, TOKENIZER_FILE, depth, with_converted
from proa_engine.sources.config_fields import check_eos, check_fields
from proa_engine.sources.gguf.files import make_file
from proa_engine.sources.gguf.header import is_gguf, parts_of
from proa_engine.sources.regular_files import check_regular, refuse_broken_link, refuse_lfs_pointer

GENERATION_FILE = "generation_config.json"
INDEX_FILE = "model.safetensors.index.json"
MODELOPT_FILE = "hf_quant_config.json"
MAX_JSON_BYTES = 32 << 20  # lists of what is not quantized may name every matrix of every expert: 3 MB
MAX_INDEX_BYTES = 256 << 20  # of a model of a trillion parameters it has 20 MB
MAX_TOKENIZER_BYTES = 256 << 20  # the largest published ones have 35 MB; gateways take as much
STORED_DTYPES = ("float32", "float16", "bfloat16")  # names of torch's types in config.json
# Fields of a decoder behind an encoder, by the names that decoders alone have.
_OF_DECODER = {
    "hidden_size": "d_model",
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "intermediate_size": "decoder_ffn_dim",
    "max_position_embeddings": "max_target_positions",
}
# Fields of older models, by the names that the others have.
_OLDER_NAMES = {"num_hidden_layers": "num_layers", "max_position_embeddings": "seq_length"}
# Weights in other formats, by the end of the file's name.
_OTHER_WEIGHTS = {
    ".bin": "PyTorch's pickle format, which can run code when it is loaded",
    ".pt": "PyTorch's pickle format, which can run code when it is loaded",
    ".pth": "PyTorch's pickle format, which can run code when it is loaded",
    ".ckpt": "PyTorch's pickle format, which can run code when it is loaded",
    ".h5": "TensorFlow's format",
    ".msgpack": "Flax's format",
    ".onnx": "ONNX",
}


def read_config(folder: Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The fields of config.json with the user's `overrides`. Those that all architectures share have the right types;
    those of older models stand there by their present names too. Fields in `thinker_config`, where Qwen's own library
    has those of Qwen3-ASR, stand beside the others."""
    config = read_json(folder / "config.json")
    if config is None:
        raise ValueError(f"{folder} is not a model folder: {_why_no_config(folder)}")
    if not config.get("quantization_config"):
        config |= _other_quantization(folder, config)
    config = _overridden(config, overrides or {})
    known = {name: config[older] for name, older in _OLDER_NAMES.items() if older in config}
    config |= {name: value for name, value in known.items() if not config.get(name)}
    if isinstance(thinker := config.pop("thinker_config", {}), dict):
        config = thinker | config
    for fields in (config, config.get("text_config")):
        check_fields(fields or {})
    return config


def _other_quantization(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """`quantization_config` as older versions of compressed-tensors and ModelOpt write it elsewhere."""
    if config.get("compression_config"):
        return {"quantization_config": config["compression_config"]}
    modelopt = read_json(folder / MODELOPT_FILE)
    return {} if modelopt is None else {"quantization_config": {"quant_method": "modelopt", **modelopt}}


def text_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the text model, which are in `text_config` if the model has other inputs too. Those of a decoder
    that follows an encoder get the names that decoders alone have.

    `transformers` 5 saves Nemotron-H's list of layers without their number, which is added.
    """
    text = config.get("text_config") or {}
    if config.get("is_encoder_decoder"):
        text = {name: config[stored] for name, stored in _OF_DECODER.items() if stored in config} | text
    fields = {**config, **{name: value for name, value in text.items() if value is not None}}
    if isinstance(types := fields.get("layers_block_type"), list):
        fields["num_hidden_layers"] = len(types)
    return fields


def missing_field(name: str) -> str:
    """The error for a model without this field."""
    return f"config.json lacks the field {name!r}"


def stored_dtype(fields: Mapping[str, Any]) -> str:
    """The type of unquantized weights, one of STORED_DTYPES; config.json may also have it as `torch.bfloat16`. Raises
    ValueError for another."""
    name = str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in STORED_DTYPES:
        raise ValueError(f"dtype {name} is not supported; supported: {', '.join(STORED_DTYPES)}")
    return name


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The fields of generation_config.json, none if there is no such file."""
    fields = read_json(folder / GENERATION_FILE) or {}
    check_eos(fields, GENERATION_FILE)
    return fields


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file."""
    data = read_file(path, max_bytes)
    if data is None:
        return None
    try:
        fields = json.loads(data, object_hook=_decode_float)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error if data else 'it is empty'}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must hold a JSON object")
    if depth(fields) > MAX_DEPTH:
        raise ValueError(f"{path} nests more than {MAX_DEPTH} deep")
    return fields


def read_file(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes | None:
    """The content of a file, also of one that a GGUF file stands for (`FILE.gguf/config.json`); None if there is no
    such file. Raises ValueError for what is not a regular file, a file of more than `max_bytes`, a Git LFS pointer, or
    a link to a file that does not exist."""
    if made := make_file(path):
        return made
    try:
        check_regular(path)
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except (FileNotFoundError, NotADirectoryError):
        refuse_broken_link(path)
        return None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise ValueError(f"{path} is too large: it has more than {max_bytes >> 20} MiB")
    refuse_lfs_pointer(path, data)
    return data


def read_tokenizer_files(folder: Path | None) -> dict[str, bytes]:
    """Return the tokenizer's files by name, converted as in `with_converted`. Empty without a folder, or
    without a tokenizer.json that it has or that is made."""
    if folder is None:
        return {}
    large = (TOKENIZER_FILE, *CONVERTED_FILES)
    limits = dict.fromkeys(FILE_NAMES, MAX_JSON_BYTES) | dict.fromkeys(large, MAX_TOKENIZER_BYTES)
    read = {name: read_file(folder / name, limit) for name, limit in limits.items()}
    try:
        files = with_converted({name: data for name, data in read.items() if data is not None})
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    return files if TOKENIZER_FILE in files else {}


def weight_files(folder: Path) -> list[Path]:
    """The *.safetensors files that the index lists, because a folder may hold others; without an index, all of them. Of
    a GGUF file, all parts."""
    if is_gguf(folder):
        return parts_of(folder)
    index = read_json(folder / INDEX_FILE, MAX_INDEX_BYTES)
    if index is not None:
        if not isinstance(index.get("weight_map"), Mapping):
            raise ValueError(f"{folder / INDEX_FILE} has no weight_map")
        names = sorted(set(map(str, index["weight_map"].values())))
        for name in names:
            refuse_broken_link(folder / name)
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            shown = ", ".join(absent[:5]) + (f" and {len(absent) - 5} more" if len(absent) > 5 else "")
            raise ValueError(f"{folder} lacks {len(absent)} of {len(names)} files that its index names: {shown}")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    for path in paths:
        refuse_broken_link(path)
    if not paths:
        raise ValueError(f"{folder} holds no *.safetensors weights{_other_weights(folder)}")
    return paths


def _other_weights(folder: Path) -> str:
    """What to do where a folder has weights in other formats only."""
    for path in sorted(folder.iterdir()):
        if kind := _OTHER_WEIGHTS.get(path.suffix):
            return (
                f": {path.name} is in {kind}; take a version of the model in safetensors, or convert it with "
                "transformers (save_pretrained)"
            )
    return ": only its other files were copied or downloaded"


def _why_no_config(folder: Path) -> str:
    names = {each.name for each in folder.iterdir()}
    if not names:
        return "it is empty; is the volume mounted, and the download complete?"
    if "adapter_config.json" in names:
        return "it is a LoRA adapter; give the base model as model, and the adapter by lora_modules"
    inner = sorted([*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json")])
    hint = f"; did you mean {inner[0].parent}?" if inner else ""
    return f"it has no config.json{hint}"


def _overridden(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` with `changes`, as a JSON merge patch (RFC 7386). Raises ValueError for the older names of rotary fields
    where the newer ones are in the file, and are what is read."""
    if "rope_parameters" in fields and (older := {"rope_scaling", "rope_theta"} & changes.keys()):
        raise ValueError(f"hf_overrides: config.json has rope_parameters; change those in place of {min(older)}")
    result = dict(fields)
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping):
            before = result.get(name)
            result[name] = _overridden(before if isinstance(before, Mapping) else {}, value)
        else:
            result[name] = value
    return result


def _decode_float(value: dict[str, Any]) -> Any:
    """transformers writes infinite numbers and NaN, which JSON has not, as {"__float__": "Infinity"}."""
    return float(str(value["__float__"])) if value.keys() == {"__float__"} else value
