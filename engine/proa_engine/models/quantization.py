"""Choose the `LinearMethod` of each matrix from how the checkpoint is quantized (`quantization_config.py`)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from proa_engine.kernels.moe import ExpertActivation
from proa_engine.kernels.moe_pairs import ExpertRange
from proa_engine.layers.linear import Unquantized
from proa_engine.layers.quant_fp8 import BlockFp8, OnlineFp8, StoredFp8
from proa_engine.layers.quant_int4 import Awq, Gptq, PackQuantized
from proa_engine.layers.quant_mxfp4 import Mxfp4
from proa_engine.layers.weights import Experts, LinearMethod, LoadedLinear, Projection, StackedExperts
from proa_engine.models.quantization_config import (
    AwqFormat,
    BlockFp8Format,
    Format,
    Fp8Format,
    GptqFormat,
    Mxfp4Format,
    OnlineFp8Format,
    PackQuantizedFormat,
    read_quantization,
)


def linear_method(stored: Mapping[str, Any] | None, wanted: str | None) -> LinearMethod:
    """Return the method for what `read_quantization` makes of the arguments."""
    quantization = read_quantization(stored, wanted)
    method = _method_of(quantization.format)
    return ExceptFor(quantization.ignored, method) if quantization.ignored else method


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


@dataclass(frozen=True, slots=True)
class ExceptFor:
    """`inner`, except for the matrices of some modules, which are stored unquantized."""

    ignored: tuple[str, ...]  # as in `Quantization`
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
