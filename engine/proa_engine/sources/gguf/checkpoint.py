"""A GGUF file as a checkpoint of Hugging Face: config.json, and the names and shapes of its tensors.

Raises ValueError with a sentence for the user.
"""

import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from proa_engine.layers.quantized.ggml_types import INTEGER_BITS
from proa_engine.sources.gguf.end_tokens import end_token_ids
from proa_engine.sources.gguf.families import FAMILIES, Family
from proa_engine.sources.gguf.header import Header, StoredTensor, parts_of, read_header
from proa_engine.sources.tensors import Change, Tensor

_ROTATION = "rope_freqs.weight"  # by which the frequencies of the rotation are divided
_LAYER = re.compile(r"blk\.(\d+)\.([\w.]+)")
_KV_HEADS = "attention.head_count_kv"
_IN_FLOAT32 = 0  # of general.file_type


def read_first(path: Path) -> Header:
    """The header of a model's first file, which alone has the metadata, by any of its files."""
    return read_header(parts_of(path)[0])


def make_config(header: Header) -> dict[str, Any]:
    """The fields of config.json. Raises ValueError, naming the field, for what is not supported."""
    family, prefix = family_of(header), header.text("general.architecture")
    given = {name.removeprefix(f"{prefix}."): value for name, value in header.fields.items()}
    types = {}
    if family.layer_types and isinstance(heads := given.get(_KV_HEADS), list):
        types = {"layer_types": [family.layer_types[each != 0] for each in heads]}
        given[_KV_HEADS] = [each for each in heads if each != 0]
    fields = {theirs: _scalar(name, given[name]) for name, theirs in family.all_fields.items() if name in given}
    shapes = {tensor.name: tensor.shape for part in _headers(header) for tensor in part.tensors}
    if "token_embd.weight" not in shapes:
        raise ValueError(f"{header.path} has no tensor token_embd.weight; is it a part of the model's files?")
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.constants,
        **fields,
        **types,
        "vocab_size": shapes["token_embd.weight"][0],
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "tie_word_embeddings": "output.weight" not in shapes,
        # What a file of 16-bit floats was converted from is not known, and float16 overflows in some models.
        "dtype": "float32" if header.fields.get("general.file_type") == _IN_FLOAT32 else "bfloat16",
        "bos_token_id": header.fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_token_ids(header),
    }
    if modules := _integer_modules(header, family):
        config["quantization_config"] = {"quant_method": "gguf", "modules": modules}
    if family.shared_score_layers:
        config["query_pre_attn_scalar"] = _score_size(config, family)
    if scaling := _rope_scaling(header, given):
        config["rope_scaling"] = scaling
    return config


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, by their names in Hugging Face checkpoints."""
    first, header = read_first(path), read_header(path)
    family = family_of(first)
    tensors: dict[str, Tensor] = {}
    for stored in header.tensors:
        if stored.name != _ROTATION:
            tensors |= _tensors(stored, first, family)
    return tensors


def family_of(header: Header) -> Family:
    """Raises ValueError for an architecture that is not supported as GGUF."""
    name = header.text("general.architecture")
    if not name:
        raise ValueError(f"{header.path} lacks the field general.architecture; is it an adapter, or a part of a model?")
    if (with_experts := f"{name} with experts") in FAMILIES and header.fields.get(f"{name}.expert_count"):
        return FAMILIES[with_experts]
    if name not in FAMILIES:
        raise ValueError(
            f"{header.path}: architecture {name} is not supported as GGUF; supported: {', '.join(FAMILIES)}; take the "
            "model's folder with config.json and *.safetensors"
        )
    return FAMILIES[name]


def _headers(first: Header) -> Iterator[Header]:
    yield first
    for path in parts_of(first.path)[1:]:
        yield read_header(path)


def _integer_modules(header: Header, family: Family) -> dict[str, list[str]]:
    """The matrices of layers whose numbers can stay integers, by type: of experts, those of whole layers only."""
    stored = [tensor for part in _headers(header) for tensor in part.tensors if _LAYER.match(tensor.name)]
    kinds = {tensor.name: tensor.type for tensor in stored}
    modules: dict[str, list[str]] = {}
    for tensor in stored:
        base = tensor.name.removesuffix("_exps.weight").rpartition("_")[0]
        experts = [kinds[name] for part in ("gate", "up", "down") if (name := f"{base}_{part}_exps.weight") in kinds]
        is_whole = all(kind in INTEGER_BITS for kind in experts) and experts[:1] == experts[1:2]
        if tensor.type in INTEGER_BITS and (is_whole or not tensor.name.endswith("_exps.weight")):
            names = (name.removesuffix(".weight") for name in _tensors(tensor, header, family))
            modules.setdefault(tensor.type, []).extend(names)
    return modules


def _scalar(name: str, value: Any) -> int | float:
    """A number; of a list, which has one for each layer, the one that is equal in all of them."""
    values = value if isinstance(value, list) else [value]
    if not values or any(each != values[0] for each in values) or not isinstance(values[0], int | float):
        raise ValueError(f"{name} differs by layer, or is no number, which is not supported as GGUF")
    return values[0]


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _score_size(config: Mapping[str, Any], family: Family) -> int:
    if config["num_hidden_layers"] == family.shared_score_layers:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return _head_dim(config)


def _rope_scaling(header: Header, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """`given`: the metadata by name, without the architecture's."""
    rotation = next((each for each in header.tensors if each.name == _ROTATION), None)
    if rotation:
        factors = _read_floats(header.path, rotation)
        return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    kind = header.text(f"{header.text('general.architecture')}.rope.scaling.type")
    if kind in ("", "none"):
        return None
    scaling = {"rope_type": kind, "factor": given.get("rope.scaling.factor")}
    for name, theirs in (
        ("rope.scaling.original_context_length", "original_max_position_embeddings"),
        ("rope.scaling.yarn_beta_fast", "beta_fast"),
        ("rope.scaling.yarn_beta_slow", "beta_slow"),
    ):
        if name in given:
            scaling[theirs] = given[name]
    return scaling


def _read_floats(path: Path, tensor: StoredTensor) -> list[float]:
    if tensor.type != "F32" or len(tensor.shape) != 1:
        raise ValueError(f"{path}: {tensor.name} is no list of 32-bit floats")
    with path.open("rb") as file:
        file.seek(tensor.start)
        return list(struct.unpack(f"<{tensor.shape[0]}f", file.read(4 * tensor.shape[0])))


def _tensors(stored: StoredTensor, header: Header, family: Family) -> dict[str, Tensor]:
    """One, or those of all experts."""
    base, _, kind = stored.name.rpartition(".")
    layer = _LAYER.fullmatch(base)
    name = family.layers.get(layer[2]) if layer else family.outer.get(base)
    if not name:
        raise ValueError(
            f"{header.path}: the tensor {stored.name} is not one of {family.architecture}, or not supported as GGUF"
        )
    prefix = f"model.layers.{layer[1]}." if layer else ""
    tensor = Tensor(stored.type, stored.shape, stored.start, _change(base, stored, header, family))
    if "*" not in name:
        return {f"{prefix}{name}.{kind}": tensor}
    one = Tensor(stored.type, stored.shape[1:], stored.start, tensor.change)
    return {
        f"{prefix}{name.replace('*', str(expert))}.{kind}": Tensor(
            one.dtype, one.shape, one.start + expert * one.num_bytes, one.change
        )
        for expert in range(stored.shape[0])
    }


def _change(base: str, stored: StoredTensor, header: Header, family: Family) -> Change:
    if family.alternates_heads and base.endswith((".attn_q", ".attn_k")):
        prefix = header.text("general.architecture")
        which = "head_count" if base.endswith("q") else "head_count_kv"
        heads = header.fields.get(f"{prefix}.attention.{which}") or header.require(f"{prefix}.attention.head_count")
        return Change(head_dim=int(stored.shape[0] // max(_scalar(which, heads), 1)))
    return Change(offset=family.norm_offset if base.endswith("norm") else 0.0)
