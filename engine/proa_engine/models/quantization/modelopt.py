"""`quantization_config` of NVIDIA's ModelOpt, and its hf_quant_config.json, in which older versions write the same."""

import fnmatch
from collections.abc import Mapping
from typing import Any

from proa_engine.models.quantization.fields import entries, only, reads_fp8_kv_cache
from proa_engine.models.quantization.formats import (
    BlockFp8Format,
    Format,
    Fp8Format,
    Nvfp4Format,
    Quantization,
    Rule,
)

_MIXED = "MIXED_PRECISION"  # `quantized_layers` names the modules, each with its algorithm
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", _MIXED)


def read_modelopt(stored: Mapping[str, Any]) -> Quantization:
    fields = stored.get("quantization", stored)  # of hf_quant_config.json: under this name
    algorithm = str(fields["quant_algo"]).upper()
    if algorithm == _MIXED:
        quantization = Quantization(None, _rules(fields["quantized_layers"]))
    else:
        quantization = Quantization(_format(algorithm, fields))
    ignored = [_pattern(entry) for entry in entries(fields, "ignore", "exclude_modules")]
    return quantization.except_for(*ignored).with_kv_cache(fp8=_reads_fp8_kv_cache(fields))


def _format(algorithm: str, fields: Mapping[str, Any]) -> Format:
    match algorithm:
        case "FP8":
            return Fp8Format("tensor", static=True)
        case "FP8_PER_CHANNEL_PER_TOKEN":
            return Fp8Format("channel", static=False)
        case "FP8_PB_WO":
            return BlockFp8Format("weight_scale")
        case "NVFP4" | "W4A16_NVFP4":
            only("group_size", fields.get("group_size", 16), (16,))
            return Nvfp4Format("weight", "weight_scale_2", False, "input_scale")
    raise ValueError(
        f"quantization with quant_algo {algorithm} is not supported; supported: {', '.join(_ALGORITHMS)}; "
        "take the model in one of these, or the unquantized one with quantization fp8"
    )


def _rules(layers: Mapping[str, Mapping[str, Any]]) -> tuple[Rule, ...]:
    """One for each format."""
    modules: dict[Format, list[str]] = {}
    for name, fields in layers.items():
        modules.setdefault(_format(str(fields["quant_algo"]).upper(), fields), []).append(name)
    return tuple(Rule(tuple(names), stored_as) for stored_as, names in modules.items())


def _pattern(entry: str) -> str:
    """A module's name, or a pattern of file names (`*`) of the whole name."""
    return f"re:{fnmatch.translate(entry)}" if any(mark in entry for mark in "*?[") else entry


def _reads_fp8_kv_cache(fields: Mapping[str, Any]) -> bool:
    """`kv_cache_scheme` in config.json, `kv_cache_quant_algo` in hf_quant_config.json."""
    algorithm = fields.get("kv_cache_quant_algo")
    return algorithm == "FP8" or reads_fp8_kv_cache(fields.get("kv_cache_scheme") or algorithm)
