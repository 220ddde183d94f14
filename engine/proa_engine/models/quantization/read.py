"""How a checkpoint's matrices are stored, from config.json's `quantization_config` and the user's option.

Raises ValueError, naming the field, for what is not supported. Does not import torch.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from proa.plugins import Group, Plugin, plugins_of
from proa_engine.models.quantization.awq import read_awq
from proa_engine.models.quantization.compressed_tensors import read_compressed_tensors
from proa_engine.models.quantization.fields import entries
from proa_engine.models.quantization.formats import (
    GgmlFormat,
    Mxfp4Format,
    OnlineFp8Format,
    PluginFormat,
    Quantization,
    Rule,
)
from proa_engine.models.quantization.fp8 import read_fp8
from proa_engine.models.quantization.gptq import read_auto_round, read_gptq
from proa_engine.models.quantization.modelopt import read_modelopt

_8_BITS = "take the unquantized model with quantization fp8, which quantizes it while loading"
_4_BITS = "take the model in awq or gptq with 4 bits, or the unquantized one with quantization fp8"
_NVIDIA_4_BITS = "take the model in fp8, awq or gptq with 4 bits, or the unquantized one with quantization fp8"
_ONLINE = {"fp8": OnlineFp8Format(), "fp8_per_block": OnlineFp8Format(by_block=True)}  # the second by vLLM's name
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
    "higgs": _4_BITS,
    "hqq": _4_BITS,
    "marlin": _4_BITS,
    "mlx": _4_BITS,
    "quanto": _8_BITS,
    "quark": _8_BITS,
    "quip#": _4_BITS,
    "sinq": _4_BITS,
    "spqr": _4_BITS,
    "torchao": _8_BITS,
    "tpu_int8": _8_BITS,
    "vptq": _4_BITS,
}


def read_quantization(stored: Mapping[str, Any] | None, wanted: str | None) -> Quantization:
    """`stored`: a checkpoint's quantization_config. `wanted`: the user's `quantization`.

    For a quantized checkpoint `wanted` may only repeat its method. Others are quantized while loading, by `_ONLINE`.
    """
    plugins = quantization_plugins()
    known = dict.fromkeys((*_ONLINE, *_READERS, *plugins))
    if wanted is not None and wanted not in known:
        raise _unsupported(wanted, known)
    if not stored:
        if wanted is not None and wanted not in _ONLINE:
            raise ValueError(f"quantization {wanted} needs a checkpoint of that format; this one is not quantized")
        return Quantization(None if wanted is None else _ONLINE[wanted])
    name = _method_name(stored)
    if wanted not in (None, name):
        raise ValueError(f"quantization {wanted} does not fit the checkpoint, which is quantized by {name}")
    try:
        return _read(name, stored, plugins)
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


def quantization_plugins() -> dict[str, Plugin]:
    """What packages add, by quant_method."""
    return plugins_of(Group.QUANTIZATION, built_in={*_READERS, *_ONLINE})


def _read(name: str, stored: Mapping[str, Any], plugins: Collection[str]) -> Quantization:
    if read := _READERS.get(name):
        return read(stored)
    if name in plugins:
        return Quantization(PluginFormat(name)).except_for(*entries(stored, "modules_to_not_convert"))
    raise _unsupported(name, ["none", *_READERS, *plugins])


def _unsupported(name: str, supported: Iterable[str]) -> ValueError:
    instead = _INSTEAD.get(name, "take the model in one of these, or the unquantized one with quantization fp8")
    return ValueError(
        f"quantization {name} is not supported; supported: {', '.join(supported)}; {instead} "
        "(docs/quantization.md), or install a package that adds it (docs/plugins.md)"
    )


def _read_mxfp4(stored: Mapping[str, Any]) -> Quantization:
    return Quantization(Mxfp4Format()).except_for(*entries(stored, "modules_to_not_convert"))


def _read_gguf(stored: Mapping[str, Any]) -> Quantization:
    """As `sources.gguf` makes it."""
    rules = [Rule(tuple(names), GgmlFormat(kind)) for kind, names in stored["modules"].items()]
    return Quantization(None, tuple(rules))


_READERS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "auto-round": read_auto_round,
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "gguf": _read_gguf,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
    "mxfp4": _read_mxfp4,
}
