"""How a checkpoint's matrices are stored, from config.json's `quantization_config` and the user's option.

Raises ValueError, naming the field, for what is not supported. Does not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

STORED_METHODS = ("auto-round", "awq", "compressed-tensors", "fp8", "gptq", "mxfp4")

_8_BITS = "take the unquantized model with quantization fp8, which quantizes it while loading"
_4_BITS = "take the model in awq or gptq with 4 bits, or the unquantized one with quantization fp8"
_NVIDIA_4_BITS = "take the model in fp8, awq or gptq with 4 bits, or the unquantized one with quantization fp8"
# What to use in place of methods that are not supported, by their quant_method.
_INSTEAD = {
    "aqlm": _4_BITS,
    "bitnet": "take a model whose weights have 4 bits or more; none of 1 or 2 bits is supported",
    "bitsandbytes": _4_BITS,
    "eetq": _8_BITS,
    "exl2": _4_BITS,
    "exl3": _4_BITS,
    "experts_int8": _8_BITS,
    "fbgemm_fp8": _8_BITS,
    "fp_quant": _NVIDIA_4_BITS,
    "gguf": _4_BITS,
    "higgs": _4_BITS,
    "hqq": _4_BITS,
    "marlin": _4_BITS,
    "mlx": _4_BITS,
    "modelopt": _NVIDIA_4_BITS,
    "modelopt_fp4": _NVIDIA_4_BITS,
    "quanto": _8_BITS,
    "quark": _8_BITS,
    "quip#": _4_BITS,
    "sinq": _4_BITS,
    "spqr": _4_BITS,
    "torchao": _8_BITS,
    "tpu_int8": _8_BITS,
    "vptq": _4_BITS,
}


@dataclass(frozen=True, slots=True)
class AwqFormat:
    group_size: int | None  # None: a group is a whole column


@dataclass(frozen=True, slots=True)
class GptqFormat:
    group_size: int | None
    desc_act: bool
    symmetric: bool
    zero_offset: int


@dataclass(frozen=True, slots=True)
class PackQuantizedFormat:
    group_size: int | None
    symmetric: bool
    group_order: bool  # the group of each input is stored


@dataclass(frozen=True, slots=True)
class Fp8Format:
    strategy: Literal["tensor", "channel"]  # what has a scale
    static: bool  # the scale of the inputs is stored


@dataclass(frozen=True, slots=True)
class BlockFp8Format:
    """Each 128 x 128 block has a scale."""

    scale_name: str


@dataclass(frozen=True, slots=True)
class Mxfp4Format:
    pass


@dataclass(frozen=True, slots=True)
class OnlineFp8Format:
    """Stored unquantized, and quantized while loading."""


Format = AwqFormat | GptqFormat | PackQuantizedFormat | Fp8Format | BlockFp8Format | Mxfp4Format | OnlineFp8Format


@dataclass(frozen=True, slots=True)
class Quantization:
    """`format` None: not quantized. `ignored`: modules that are stored unquantized, each a module's name or the last
    part of it, or "re:" and a pattern of the whole name."""

    format: Format | None
    ignored: tuple[str, ...] = ()


def read_quantization(stored: Mapping[str, Any] | None, wanted: str | None) -> Quantization:
    """`stored`: a checkpoint's quantization_config. `wanted`: the user's `quantization`.

    For a quantized checkpoint `wanted` may only repeat its method. For others, "fp8" quantizes them while loading.
    """
    if not stored:
        if wanted not in (None, "fp8"):
            raise ValueError(f"quantization {wanted} needs a checkpoint of that format; this one is not quantized")
        return Quantization(OnlineFp8Format() if wanted else None)
    name = _method_name(stored)
    if wanted not in (None, name):
        raise ValueError(f"quantization {wanted} does not fit the checkpoint, which is quantized by {name}")
    try:
        return _read(name, stored)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"quantization {name}: quantization_config in config.json cannot be read: a field is missing or has the "
            f"wrong type ({type(error).__name__}: {error})"
        ) from error


def _method_name(stored: Mapping[str, Any]) -> str:
    if "quant_method" in stored:
        return str(stored["quant_method"])
    if _is_bitsandbytes(stored):  # of before quant_method existed
        return "bitsandbytes"
    # MLX's field has the bits alone, or those of each module too.
    return "mlx" if {"bits", "group_size"} <= stored.keys() else "unnamed"


def _is_bitsandbytes(stored: Mapping[str, Any]) -> bool:
    return bool(stored.get("load_in_4bit") or stored.get("load_in_8bit"))


def _read(name: str, stored: Mapping[str, Any]) -> Quantization:
    match name:
        case "auto-round":
            return Quantization(_auto_round(stored), _kept_by_auto_round(stored))
        case "awq":
            return Quantization(_awq(stored), _ignored(stored, "modules_to_not_convert"))
        case "gptq":
            return Quantization(_gptq(stored))
        case "fp8":
            return Quantization(_fp8(stored), _ignored(stored, "modules_to_not_convert", "ignored_layers"))
        case "mxfp4":
            return Quantization(Mxfp4Format(), _ignored(stored, "modules_to_not_convert"))
        case "compressed-tensors":
            return Quantization(_compressed_tensors(stored), _ignored(stored, "ignore"))
    instead = _INSTEAD.get(name, "take the model in one of these, or the unquantized one with quantization fp8")
    raise ValueError(
        f"quantization {name} is not supported; supported: none, {', '.join(STORED_METHODS)}; {instead} "
        "(docs/quantization.md)"
    )


def _ignored(stored: Mapping[str, Any], *fields: str) -> tuple[str, ...]:
    return tuple(entry for field in fields for entry in stored.get(field) or ())


def _awq(stored: Mapping[str, Any]) -> Format:
    _only("bits", stored.get("bits"), (4,))
    _only("version", str(stored.get("version", "gemm")).lower(), ("gemm",))
    _only("zero_point", stored.get("zero_point", True), (True,))
    return AwqFormat(_group_size(stored))


def _gptq(stored: Mapping[str, Any]) -> Format:
    _only("bits", stored.get("bits"), (4,))
    _only("checkpoint_format", stored.get("checkpoint_format", "gptq"), ("gptq", "gptq_v2"))
    _only("dynamic", stored.get("dynamic") or None, (None,))
    _only("lm_head", stored.get("lm_head", False), (False,))
    return GptqFormat(
        _group_size(stored),
        desc_act=stored.get("desc_act", False),
        symmetric=stored.get("sym", False),
        zero_offset=0 if stored.get("checkpoint_format") == "gptq_v2" else 1,
    )


def _auto_round(stored: Mapping[str, Any]) -> Format:
    """AutoRound's weights in the layout of GPTQ's version 1."""
    _only("bits", stored.get("bits"), (4,))
    _only("packing_format", stored.get("packing_format"), ("auto_round:auto_gptq",))
    _only("data_type", stored.get("data_type", "int"), ("int",))
    _only("act_bits", stored.get("act_bits") or 16, (16, 32))
    return GptqFormat(_group_size(stored), desc_act=False, symmetric=stored.get("sym", True), zero_offset=1)


def _kept_by_auto_round(stored: Mapping[str, Any]) -> tuple[str, ...]:
    """The modules that `extra_config` leaves in 16 or 32 bits. Other settings of single modules are refused."""
    kept = []
    for name, settings in (stored.get("extra_config") or {}).items():
        bits = settings.get("bits", stored["bits"])
        if bits >= 16:
            kept.append(name)
            continue
        for field in ("bits", "group_size", "sym"):
            if settings.get(field, stored.get(field)) != stored.get(field):
                raise ValueError(
                    f"quantization with {field} {settings[field]} for {name} (extra_config) is not supported; "
                    "supported: that of the other modules, or bits 16"
                )
    return tuple(kept)


def _group_size(stored: Mapping[str, Any]) -> int | None:
    size = int(stored.get("group_size", 128))
    return None if size == -1 else size


def _fp8(stored: Mapping[str, Any]) -> Format:
    """128 x 128 blocks if `weight_block_size` is set, else one scale for each matrix."""
    _only("activation_scheme", stored.get("activation_scheme", "dynamic"), ("dynamic", "static"))
    _only("fmt", stored.get("fmt", "e4m3"), ("e4m3",))
    block = stored.get("weight_block_size")
    if block is None:
        return Fp8Format("tensor", static=stored.get("activation_scheme") == "static")
    _only("weight_block_size", list(block), ([128, 128],))
    _only("activation_scheme", stored.get("activation_scheme", "dynamic"), ("dynamic",))
    return BlockFp8Format("weight_scale_inv")


def _compressed_tensors(stored: Mapping[str, Any]) -> Format:
    _only("format", stored.get("format"), ("float-quantized", "pack-quantized"))
    groups = list((stored.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise ValueError(f"{len(groups)} config_groups of compressed-tensors are not supported; supported: one")
    _only("targets", groups[0].get("targets"), (["Linear"],))
    weights, inputs = groups[0]["weights"], groups[0].get("input_activations")
    if stored["format"] == "pack-quantized":
        return _pack_quantized(weights, inputs)
    if inputs is None:
        raise ValueError("input_activations null is not supported; supported: 8-bit floats")
    for tensor in (weights, inputs):
        _only("type", tensor.get("type", "float"), ("float",))
        _only("num_bits", tensor.get("num_bits", 8), (8,))
        _only("symmetric", tensor.get("symmetric", True), (True,))
    _only("strategy", weights["strategy"], ("tensor", "channel", "block"))
    if weights["strategy"] == "block":
        _only("block_structure", list(weights.get("block_structure") or ()), ([128, 128],))
        _only("strategy", inputs["strategy"], ("group",))
        _only("group_size", inputs.get("group_size"), (128,))
        return BlockFp8Format("weight_scale")
    _only("strategy", inputs["strategy"], ("tensor", "token"))
    return Fp8Format(weights["strategy"], static=not inputs.get("dynamic", False))


def _pack_quantized(weights: Mapping[str, Any], inputs: object) -> Format:
    _only("input_activations", inputs, (None,))
    _only("type", weights.get("type", "int"), ("int",))
    _only("num_bits", weights.get("num_bits"), (4,))
    _only("strategy", weights.get("strategy"), ("group", "channel"))
    _only("actorder", weights.get("actorder"), (None, "weight", "static", "group", "dynamic"))
    return PackQuantizedFormat(
        int(weights["group_size"]) if weights["strategy"] == "group" else None,
        symmetric=weights.get("symmetric", True),
        group_order=weights.get("actorder") in ("group", "dynamic"),
    )


def _only(field: str, value: object, supported: Sequence[object]) -> None:
    if value not in supported:
        raise ValueError(
            f"quantization with {field} {value} is not supported; supported: {', '.join(map(str, supported))}"
        )
