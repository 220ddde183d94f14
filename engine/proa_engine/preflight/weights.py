"""Whether a checkpoint's tensors can be those of its config.json, and the memory that they take: decided from their
names, types and shapes.

Only what all decoders of the registry share is checked here. All tensors are checked when they are loaded.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from proa_engine.layers.expert_refusals import no_stacked_experts
from proa_engine.layers.quantized.ggml_types import BLOCKS, INTEGER_BITS
from proa_engine.models.quantization.formats import (
    GptqFormat,
    OnlineFp8Format,
    PackQuantizedFormat,
    PluginFormat,
    Quantization,
)
from proa_engine.models.text_prefix import text_prefix
from proa_engine.sources.tensors import FLOATS, ITEM_BYTES, Tensor

HALF_SIZE = 1 << 18  # `HALF_MIN_NUMEL` of the engine's linear products, whose module needs torch
_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
_QUANTIZED = ("weight", "weight_packed", "qweight")  # the last part of the names of numbers; gpt-oss: `*_blocks`
_FIRST_EXPERT = re.compile(rf"(.+\.experts\.0\.\w+)\.(?:{'|'.join(_QUANTIZED)})")
_STACKED_EXPERTS = re.compile(r"(.+\.experts)\.(?:gate_up_proj|down_proj)\w*")
_SHOWN = 5


def check_tensors(tensors: Mapping[str, Tensor], fields: Mapping[str, Any], *, architecture: str, folder: str) -> None:
    """`fields`: of config.json's text model. Raises ValueError if embeddings or layers are missing or do not have the
    sizes in `fields`, or if unquantized weights are not floating-point numbers."""
    prefix = text_prefix(tensors.__contains__)
    name = prefix.embedding_weight
    wrong = f"the weights in {folder} are not those of its config.json"
    if name not in tensors:
        raise ValueError(f"{wrong}: {name} is missing, which {architecture} has")
    for dim, field in enumerate(("vocab_size", "hidden_size")):
        shape, wanted = tensors[name].shape, fields.get(field)
        if len(shape) != 2 or wanted not in (None, shape[dim]):
            raise ValueError(f"{wrong}: {name} has shape {list(shape)}, but {field} is {wanted}")
    layers = prefix.of_layers
    _check_layers(tensors, layers, fields, wrong)
    if not fields.get("quantization_config"):
        for name, tensor in tensors.items():
            if name.startswith(layers) and name.endswith("weight") and tensor.dtype not in (*FLOATS, *BLOCKS):
                raise ValueError(
                    f"{wrong}: {name} is stored as {tensor.dtype}, so it is quantized, but there is no "
                    "quantization_config; was config.json replaced by the one of the unquantized model?"
                )


def _check_layers(tensors: Mapping[str, Tensor], prefix: str, fields: Mapping[str, Any], wrong: str) -> None:
    count = fields.get("num_hidden_layers")
    if count is None:
        return
    found = {name.removeprefix(prefix).partition(".")[0] for name in tensors if name.startswith(prefix)}
    # Not all of them, because a wrong count may be a billion.
    missing = list(islice((number for number in range(count) if str(number) not in found), _SHOWN + 1))
    if missing:
        shown = ", ".join(map(str, missing[:_SHOWN])) + (", …" if len(missing) > _SHOWN else "")
        raise ValueError(f"{wrong}: num_hidden_layers is {count}, but layers {shown} have no tensors")


def check_experts(tensors: Mapping[str, Tensor], fields: Mapping[str, Any], quantization: Quantization) -> None:
    """Raise ValueError if experts are stored in a format that only other matrices can have. Of each layer the first
    expert is checked."""
    for name, _ in _of_decoder(tensors, fields):
        if found := _STACKED_EXPERTS.fullmatch(name):
            stored = quantization.format_of(found[1])
            if stored and not stored.takes_stacked_experts:
                raise no_stacked_experts(name)
        elif found := _FIRST_EXPERT.fullmatch(name):
            stored = quantization.format_of(found[1])
            if stored and stored.expert_refusal:
                raise ValueError(f"{found[1]}: {stored.expert_refusal}")


def least_bytes(
    tensors: Mapping[str, Tensor], fields: Mapping[str, Any], *, dtype: str, quantization: Quantization, on_cpu: bool
) -> int:
    """The bytes of the decoder's weights in memory, at least: without the LM head, image encoders, and layers behind
    the last one. Floating-point numbers are converted to `dtype`, one of `EngineConfig.dtype`. On a GPU they are
    converted to 8 bits if the engine quantizes them, and quantized matrices are held as they are stored; on a CPU these
    are held dequantized, without their scales and zeros. Large float32 matrices may be held in float16 there."""
    of_float = _BYTES[dtype]
    formats = [quantization.format, *(rule.format for rule in quantization.rules)]
    dequantizes = on_cpu and not any(isinstance(each, PluginFormat) for each in formats)
    if dequantizes:
        bits = max((each.bits for each in formats if isinstance(each, GptqFormat | PackQuantizedFormat)), default=4)
        item_bytes: dict[str, float] = {"I8": 4, "F8_E4M3": 4, "U8": 8, "I32": 32 // bits * of_float}
        item_bytes |= dict.fromkeys(BLOCKS, of_float)
    else:
        of_float = 1 if isinstance(quantization.format, OnlineFp8Format) else of_float
        integers = {kind: bits / 8 for kind, bits in INTEGER_BITS.items()}
        item_bytes = {**ITEM_BYTES, **dict.fromkeys(BLOCKS, of_float), **integers}
    item_bytes |= dict.fromkeys(FLOATS, of_float)

    def held(tensor: Tensor) -> float:
        num_bytes = tensor.size * item_bytes.get(tensor.dtype, 0)
        may_be_half = on_cpu and of_float == 4 and num_bytes >= 4 * HALF_SIZE
        return num_bytes / 2 if may_be_half else num_bytes

    total = sum(
        held(tensor)
        for name, tensor in _of_decoder(tensors, fields)
        if not (dequantizes and _belongs_to_matrix(name, tensor))
    )
    return int(total)


def _belongs_to_matrix(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is not a weight, but says what the numbers of a quantized matrix stand for."""
    last = name.rpartition(".")[2]
    if tensor.dtype in FLOATS:
        return "scale" in last
    return last not in _QUANTIZED and not last.endswith("_blocks")


def _of_decoder(tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the decoder, without the LM head and layers behind the last one."""
    prefix = text_prefix(tensors.__contains__)
    inner, layers = f"{prefix.decoder}.".lstrip("."), prefix.of_layers
    num_layers = fields.get("num_hidden_layers", 0)
    for name, tensor in tensors.items():
        # Embeddings and other tensors beside the layers have no number.
        number = name.removeprefix(layers).partition(".")[0] if name.startswith(layers) else ""
        is_behind = number.isdigit() and int(number) >= num_layers
        if name.startswith(inner) and not is_behind and not name.startswith(f"{prefix.head}."):
            yield name, tensor
