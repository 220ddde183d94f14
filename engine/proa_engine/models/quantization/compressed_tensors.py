"""compressed-tensors' `quantization_config`, which llm-compressor writes.

`config_groups` say which modules are quantized how: a group's `targets` are modules' names, "re:" and a pattern, or the
name of a class of modules, of which here only `Linear` exists. Names come before patterns, and these before classes.
"""

from collections.abc import Mapping
from typing import Any

from proa_engine.models.quantization.fields import entries, group_size, only, reads_fp8_kv_cache
from proa_engine.models.quantization.formats import (
    BlockFp8Format,
    Format,
    Fp8Format,
    Int8Format,
    Mxfp4PackedFormat,
    Nvfp4Format,
    PackQuantizedFormat,
    Quantization,
    Rule,
)

_MIXED = "mixed-precision"  # each group has a format of its own
_4_BIT_FLOATS = ("mxfp4-pack-quantized", "nvfp4-pack-quantized")
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", *_4_BIT_FLOATS)


def read_compressed_tensors(stored: Mapping[str, Any]) -> Quantization:
    only("format", stored.get("format"), (*_FORMATS, _MIXED))
    only("transform_config", stored.get("transform_config") or None, (None,))  # rotations of the inputs
    only("sparsity_config", (stored.get("sparsity_config") or {}).get("format", "dense"), ("dense",))
    names, patterns, everything = [], [], None
    groups = stored.get("config_groups") or {}
    if not groups:
        raise ValueError("compressed-tensors without config_groups is not supported")
    for group in groups.values():
        stored_as = _format(group, group.get("format") or stored["format"])
        targets = group["targets"]
        if "Linear" in targets:
            everything = everything or stored_as
        by_pattern = tuple(each for each in targets if each.startswith("re:"))
        names.append(Rule(tuple(each for each in targets if each not in ("Linear", *by_pattern)), stored_as))
        patterns.append(Rule(by_pattern, stored_as))
    rules = tuple(rule for rule in (*names, *patterns) if rule.modules)
    quantization = Quantization(everything, rules).except_for(*entries(stored, "ignore"))
    return quantization.with_kv_cache(fp8=reads_fp8_kv_cache(stored.get("kv_cache_scheme")))


def _format(group: Mapping[str, Any], stored_as: str) -> Format:
    weights, inputs = group["weights"], group.get("input_activations")
    only("output_activations", group.get("output_activations"), (None,))
    match stored_as:
        case "pack-quantized":
            return _pack_quantized(weights, inputs)
        case "float-quantized":
            return _float_quantized(weights, inputs)
        case "int-quantized":
            return _int_quantized(weights, inputs)
        case "naive-quantized":  # the name of both when only the weights are quantized
            return (_int_quantized if weights["type"] == "int" else _float_quantized)(weights, inputs)
        case "mxfp4-pack-quantized":
            _check_4_bit_floats(weights, inputs, "group", 32)
            return Mxfp4PackedFormat("weight_packed")
        case "nvfp4-pack-quantized":
            _check_4_bit_floats(weights, inputs, "tensor_group", 16)
            return Nvfp4Format("weight_packed", "weight_global_scale", True, "input_global_scale")
    raise ValueError(f"quantization with format {stored_as} is not supported; supported: {', '.join(_FORMATS)}")


def _float_quantized(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Format:
    if inputs is None:
        raise ValueError("input_activations null is not supported; supported: 8-bit floats")
    for name, tensor in (("weights", weights), ("input_activations", inputs)):
        only(f"type in {name}", tensor.get("type", "float"), ("float",))
        only(f"num_bits in {name}", tensor.get("num_bits", 8), (8,))
        only(f"symmetric in {name}", tensor.get("symmetric", True), (True,))
    only("strategy in weights", weights["strategy"], ("tensor", "channel", "block"))
    if weights["strategy"] == "block":
        only("block_structure", list(weights.get("block_structure") or ()), ([128, 128],))
        only("strategy in input_activations", inputs["strategy"], ("group",))
        only("group_size in input_activations", inputs.get("group_size"), (128,))
        return BlockFp8Format("weight_scale")
    only("strategy in input_activations", inputs["strategy"], ("tensor", "token"))
    return Fp8Format(weights["strategy"], static=not inputs.get("dynamic", False))


def _int_quantized(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Format:
    if inputs is None:
        raise ValueError("input_activations null is not supported; supported: 8-bit integers")
    for name, tensor in (("weights", weights), ("input_activations", inputs)):
        only(f"type in {name}", tensor.get("type", "int"), ("int",))
        only(f"num_bits in {name}", tensor.get("num_bits", 8), (8,))
    only("symmetric in weights", weights.get("symmetric", True), (True,))
    only("strategy in weights", weights["strategy"], ("tensor", "channel"))
    only("strategy in input_activations", inputs["strategy"], ("tensor", "token"))
    return Int8Format(
        weights["strategy"], static=not inputs.get("dynamic", False), symmetric=inputs.get("symmetric", True)
    )


def _pack_quantized(weights: Mapping[str, Any], inputs: object) -> Format:
    only("input_activations", inputs, (None,))
    only("type in weights", weights.get("type", "int"), ("int",))
    only("num_bits in weights", weights.get("num_bits"), (4, 8))
    only("strategy in weights", weights.get("strategy"), ("group", "channel"))
    only("actorder in weights", weights.get("actorder"), (None, "weight", "static", "group", "dynamic"))
    return PackQuantizedFormat(
        weights["num_bits"],
        group_size(weights) if weights["strategy"] == "group" else None,
        symmetric=weights.get("symmetric", True),
        group_order=weights.get("actorder") in ("group", "dynamic"),
    )


def _check_4_bit_floats(
    weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, strategy: str, group_size: int
) -> None:
    """Inputs of 4 bits are multiplied unquantized, as if only the weights were quantized."""
    for name, tensor in (("weights", weights), ("input_activations", inputs or weights)):
        only(f"type in {name}", tensor.get("type", "float"), ("float",))
        only(f"num_bits in {name}", tensor.get("num_bits"), (4,))
        only(f"symmetric in {name}", tensor.get("symmetric", True), (True,))
    only("strategy in weights", weights.get("strategy"), (strategy,))
    only("group_size in weights", weights.get("group_size"), (group_size,))
