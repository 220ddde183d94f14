"""Choose the `LinearMethod` of each matrix from how the checkpoint is quantized (`read.py`)."""

from collections.abc import Mapping
from typing import Any

from proa_engine.layers.linear import Unquantized
from proa_engine.layers.quant_fp8 import BlockFp8, OnlineFp8, StoredFp8
from proa_engine.layers.quant_int4 import Awq, Gptq, PackQuantized
from proa_engine.layers.quant_mxfp4 import Mxfp4
from proa_engine.layers.weights import LinearMethod
from proa_engine.models.quantization.by_module import ByModule
from proa_engine.models.quantization.formats import (
    AwqFormat,
    BlockFp8Format,
    Format,
    Fp8Format,
    GptqFormat,
    Mxfp4Format,
    OnlineFp8Format,
    PackQuantizedFormat,
)
from proa_engine.models.quantization.read import read_quantization


def linear_method(stored: Mapping[str, Any] | None, wanted: str | None) -> LinearMethod:
    """Return the method for what `read_quantization` makes of the arguments."""
    quantization = read_quantization(stored, wanted)
    if not quantization.rules:
        return _method_of(quantization.format)
    formats = {quantization.format, *(rule.format for rule in quantization.rules)}
    return ByModule(quantization, {each: _method_of(each) for each in formats})


def _method_of(stored: Format | None) -> LinearMethod:
    match stored:
        case None:
            return Unquantized()
        case OnlineFp8Format():
            return OnlineFp8()
        case AwqFormat(group_size):
            return Awq(group_size)
        case GptqFormat():
            return Gptq(
                stored.group_size,
                desc_act=stored.desc_act,
                symmetric=stored.symmetric,
                zero_offset=stored.zero_offset,
            )
        case PackQuantizedFormat(group_size, symmetric, group_order):
            return PackQuantized(group_size, symmetric, group_order)
        case Fp8Format(strategy, static):
            return StoredFp8(strategy, static=static)
        case BlockFp8Format(scale_name):
            return BlockFp8(scale_name)
        case Mxfp4Format():
            return Mxfp4()
