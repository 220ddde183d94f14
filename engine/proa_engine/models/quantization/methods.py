"""Choose the `LinearMethod` of each matrix from how the checkpoint is quantized (`read.py`)."""

from collections.abc import Mapping
from typing import Any

from proa.plugins import Plugin
from proa_engine.layers.linear import Unquantized
from proa_engine.layers.quantized.quant_fp4 import Mxfp4, Mxfp4Packed, Nvfp4
from proa_engine.layers.quantized.quant_fp8 import BlockFp8, OnlineFp8, StoredFp8
from proa_engine.layers.quantized.quant_ggml import Ggml
from proa_engine.layers.quantized.quant_int import Awq, Gptq, PackQuantized
from proa_engine.layers.quantized.quant_int8 import StoredInt8
from proa_engine.layers.weights import LinearMethod
from proa_engine.models.quantization.by_module import ByModule
from proa_engine.models.quantization.formats import (
    AwqFormat,
    BlockFp8Format,
    Format,
    Fp8Format,
    GgmlFormat,
    GptqFormat,
    Int8Format,
    Mxfp4Format,
    Mxfp4PackedFormat,
    Nvfp4Format,
    OnlineFp8Format,
    PackQuantizedFormat,
    PluginFormat,
    Quantization,
)
from proa_engine.models.quantization.read import quantization_plugins


def linear_method(quantization: Quantization, stored: Mapping[str, Any] | None) -> LinearMethod:
    """Return the method for what `read_quantization` made of `stored`."""
    if quantization == Quantization(None):
        return Unquantized()
    formats = {quantization.format, *(rule.format for rule in quantization.rules)}
    return ByModule(quantization, {each: _method_of(each, stored) for each in formats})


def _method_of(stored: Format | None, fields: Mapping[str, Any] | None) -> LinearMethod:
    """`fields`: all of quantization_config, which plugins read themselves."""
    match stored:
        case None:
            return Unquantized()
        case OnlineFp8Format(by_block):
            return OnlineFp8(by_block)
        case AwqFormat(group_size):
            return Awq(group_size)
        case GptqFormat():
            return Gptq(
                stored.bits,
                stored.group_size,
                desc_act=stored.desc_act,
                symmetric=stored.symmetric,
                zero_offset=stored.zero_offset,
            )
        case PackQuantizedFormat(bits, group_size, symmetric, group_order):
            return PackQuantized(bits, group_size, symmetric, group_order)
        case Fp8Format(strategy, static):
            return StoredFp8(strategy, static=static)
        case BlockFp8Format(scale_name):
            return BlockFp8(scale_name)
        case Int8Format(strategy, static, symmetric):
            return StoredInt8(strategy, static=static, symmetric=symmetric)
        case Mxfp4Format():
            return Mxfp4()
        case Mxfp4PackedFormat(weight_name):
            return Mxfp4Packed(weight_name)
        case Nvfp4Format(weight_name, global_scale_name, divides, input_scale_name):
            return Nvfp4(weight_name, global_scale_name, divides, input_scale_name)
        case GgmlFormat(kind):
            return Ggml(kind)
        case PluginFormat(quant_method):
            return _method_of_plugin(quantization_plugins()[quant_method], fields or {})


def _method_of_plugin(plugin: Plugin, fields: Mapping[str, Any]) -> LinearMethod:
    read = plugin.load()
    if not callable(read):
        raise plugin.of_wrong_kind("a function that reads quantization_config and returns a LinearMethod")
    try:
        method: LinearMethod = read(fields)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{plugin} cannot read quantization_config in config.json: {type(error).__name__}: {error}"
        ) from error
    return method
