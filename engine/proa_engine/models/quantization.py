"""Choose the `LinearMethod` of each matrix from config.json's `quantization_config` and the user's option.

Raises ValueError, naming the field, for what is not supported.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from proa_engine.kernels.moe import ExpertActivation
from proa_engine.kernels.moe_pairs import ExpertRange
from proa_engine.layers.linear import Unquantized
from proa_engine.layers.quant_fp8 import BlockFp8, OnlineFp8, StoredFp8
from proa_engine.layers.quant_int4 import Awq, Gptq
from proa_engine.layers.quant_mxfp4 import Mxfp4
from proa_engine.layers.weights import Experts, LinearMethod, LoadedLinear, Projection, StackedExperts

STORED_METHODS = ("awq", "compressed-tensors", "fp8", "gptq", "mxfp4")


def linear_method(stored: Mapping[str, Any] | None, wanted: str | None) -> LinearMethod:
    """Return the method for `stored`, a checkpoint's quantization_config, and `wanted`, the user's `quantization`.

    For a quantized checkpoint `wanted` may only repeat its method. For others, "fp8" quantizes them while loading.
    """
    if not stored:
        if wanted not in (None, "fp8"):
            raise ValueError(f"quantization {wanted} needs a checkpoint of that format; this one is not quantized")
        return OnlineFp8() if wanted else Unquantized()
    name = stored.get("quant_method", "unnamed")
    if wanted not in (None, name):
        raise ValueError(f"quantization {wanted} does not fit the checkpoint, which is quantized by {name}")
    match name:
        case "awq":
            return _except_for(_ignored(stored, "modules_to_not_convert"), _awq(stored))
        case "gptq":
            return _gptq(stored)
        case "fp8":
            return _except_for(_ignored(stored, "modules_to_not_convert", "ignored_layers"), _fp8(stored))
        case "mxfp4":
            return _except_for(_ignored(stored, "modules_to_not_convert"), Mxfp4())
        case "compressed-tensors":
            return _except_for(_ignored(stored, "ignore"), _compressed_tensors(stored))
    raise ValueError(f"quantization {name} is not supported; supported: none, {', '.join(STORED_METHODS)}")


@dataclass(frozen=True, slots=True)
class ExceptFor:
    """`inner`, except for the matrices of some modules, which are stored unquantized."""

    ignored: tuple[str, ...]  # a module's name or the last part of it, or "re:" and a pattern of the whole name
    inner: LinearMethod

    @property
    def width_unit(self) -> int:
        return self.inner.width_unit

    def load(self, projections: Sequence[Projection], bias: torch.Tensor | None) -> LoadedLinear:
        return self._method(projections).load(projections, bias)

    def take_matrix(self, projection: Projection) -> torch.Tensor:
        return self._method([projection]).take_matrix(projection)

    def load_experts(
        self, gate_up: Sequence[Sequence[Projection]], down: Sequence[Projection], held: ExpertRange
    ) -> Experts:
        everything = [projection for pair in gate_up for projection in pair]
        return self._method([*everything, *down]).load_experts(gate_up, down, held)

    def load_stacked_experts(self, experts: StackedExperts, activation: ExpertActivation) -> Experts:
        method = Unquantized() if self.ignores(experts.weights.prefix) else self.inner
        return method.load_stacked_experts(experts, activation)

    def _method(self, projections: Sequence[Projection]) -> LinearMethod:
        names = [projection.weights.prefix for projection in projections]
        plain = [name for name in names if self.ignores(name)]
        if plain and len(plain) != len(names):
            raise ValueError(f"{', '.join(names)} are multiplied as one, but only {', '.join(plain)} is not quantized")
        return Unquantized() if plain else self.inner

    def ignores(self, name: str) -> bool:
        return any(_matches(entry, name) for entry in self.ignored)


def _matches(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    return f".{entry}." in f".{name}."


def _except_for(ignored: tuple[str, ...], method: LinearMethod) -> LinearMethod:
    return ExceptFor(ignored, method) if ignored else method


def _ignored(stored: Mapping[str, Any], *fields: str) -> tuple[str, ...]:
    return tuple(entry for field in fields for entry in stored.get(field) or ())


def _awq(stored: Mapping[str, Any]) -> LinearMethod:
    _only("bits", stored.get("bits"), (4,))
    _only("version", str(stored.get("version", "gemm")).lower(), ("gemm",))
    _only("zero_point", stored.get("zero_point", True), (True,))
    return Awq(_group_size(stored))


def _gptq(stored: Mapping[str, Any]) -> LinearMethod:
    _only("bits", stored.get("bits"), (4,))
    _only("checkpoint_format", stored.get("checkpoint_format", "gptq"), ("gptq", "gptq_v2"))
    _only("dynamic", stored.get("dynamic") or None, (None,))
    _only("lm_head", stored.get("lm_head", False), (False,))
    return Gptq(
        _group_size(stored),
        desc_act=stored.get("desc_act", False),
        symmetric=stored.get("sym", False),
        zero_offset=0 if stored.get("checkpoint_format") == "gptq_v2" else 1,
    )


def _group_size(stored: Mapping[str, Any]) -> int | None:
    size = int(stored.get("group_size", 128))
    return None if size == -1 else size


def _fp8(stored: Mapping[str, Any]) -> LinearMethod:
    """128 x 128 blocks if `weight_block_size` is set, else one scale for each matrix."""
    _only("activation_scheme", stored.get("activation_scheme", "dynamic"), ("dynamic", "static"))
    _only("fmt", stored.get("fmt", "e4m3"), ("e4m3",))
    block = stored.get("weight_block_size")
    if block is None:
        return StoredFp8("tensor", static=stored.get("activation_scheme") == "static")
    _only("weight_block_size", list(block), ([128, 128],))
    _only("activation_scheme", stored.get("activation_scheme", "dynamic"), ("dynamic",))
    return BlockFp8("weight_scale_inv")


def _compressed_tensors(stored: Mapping[str, Any]) -> LinearMethod:
    _only("format", stored.get("format"), ("float-quantized",))
    groups = list((stored.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise ValueError(f"{len(groups)} config_groups of compressed-tensors are not supported; supported: one")
    _only("targets", groups[0].get("targets"), (["Linear"],))
    weights, inputs = groups[0]["weights"], groups[0].get("input_activations")
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
        return BlockFp8("weight_scale")
    _only("strategy", inputs["strategy"], ("tensor", "token"))
    return StoredFp8(weights["strategy"], static=not inputs.get("dynamic", False))


def _only(field: str, value: object, supported: Sequence[object]) -> None:
    if value not in supported:
        raise ValueError(
            f"quantization with {field} {value} is not supported; supported: {', '.join(map(str, supported))}"
        )
