"""The `LinearMethod` of experts in 4-bit floats with one exponent for 32 inputs (mxfp4, the OCP's microscaling format),
as gpt-oss stores them. All other matrices are unquantized."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from proa_engine.kernels.linear import Linear
from proa_engine.kernels.moe import ExpertActivation, FusedExperts, LoopedExperts
from proa_engine.kernels.moe_mxfp4 import GROUP, LARGEST_EXPONENT, dequantize_mxfp4, pack_mxfp4
from proa_engine.kernels.moe_pairs import ExpertRange
from proa_engine.layers.experts import take_biases, take_gate_up
from proa_engine.layers.linear import Unquantized
from proa_engine.layers.weights import Experts, LoadedLinear, Projection, StackedExperts

Stored = tuple[torch.Tensor, torch.Tensor]  # blocks [experts, outputs, groups, 16]; scales [experts, outputs, groups]


@dataclass(frozen=True, slots=True)
class Mxfp4:
    @property
    def width_unit(self) -> int:
        return GROUP

    def load(self, projections: Sequence[Projection], bias: torch.Tensor | None) -> LoadedLinear:
        return Unquantized().load(projections, bias)

    def take_matrix(self, projection: Projection) -> torch.Tensor:
        return Unquantized().take_matrix(projection)

    def load_experts(
        self, gate_up: Sequence[Sequence[Projection]], down: Sequence[Projection], held: ExpertRange
    ) -> Experts:
        raise ValueError("experts of mxfp4 in one tensor each are not supported; supported: all experts in one tensor")

    def load_stacked_experts(self, experts: StackedExperts, activation: ExpertActivation) -> Experts:
        if experts.hidden_size % GROUP or experts.length % GROUP:
            raise ValueError(
                f"{experts.weights.prefix}: {experts.hidden_size} inputs and {experts.length} of the inner width on "
                f"each rank cannot be cut into groups of {GROUP}; a smaller tensor_parallel_size may help"
            )
        stored = _take_gate_up(experts), _take_down(experts)
        biases = take_biases(experts)
        if not stored[0][0].is_cpu:
            gate_up, down = (pack_mxfp4(*each, bias) for each, bias in zip(stored, biases, strict=True))
            return FusedExperts(gate_up, down, activation=activation, held=experts.held)
        first, second = (_dequantized(*each, bias) for each, bias in zip(stored, biases, strict=True))
        return LoopedExperts(first, second, activation, experts.held)


class DequantizedLinear:
    """The reference: a float32 product by the dequantized weight, [..., inputs] -> [..., outputs] in x's type."""

    def __init__(self, blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        """blocks [outputs, groups, 16], scales [outputs, groups]"""
        self.linear = Linear(dequantize_mxfp4(blocks, scales), None if bias is None else bias.float())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.float()).to(x.dtype)


def _dequantized(blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> list[DequantizedLinear]:
    biases = [None] * len(blocks) if bias is None else bias
    return [DequantizedLinear(*each) for each in zip(blocks, scales, biases, strict=True)]


def _take_gate_up(experts: StackedExperts) -> Stored:
    groups = experts.hidden_size // GROUP
    return _checked(
        experts,
        take_gate_up(experts, "gate_up_proj_blocks", after=(groups, GROUP // 2), dtype=torch.uint8),
        take_gate_up(experts, "gate_up_proj_scales", after=(groups,), dtype=torch.uint8),
    )


def _take_down(experts: StackedExperts) -> Stored:
    shape = (experts.held.total, experts.hidden_size, experts.inner_size // GROUP)
    part = experts.inner_part(2, GROUP)
    take = experts.weights.take
    return _checked(
        experts,
        take("down_proj_blocks", (*shape, GROUP // 2), part, torch.uint8),
        take("down_proj_scales", shape, part, torch.uint8),
    )


def _checked(experts: StackedExperts, blocks: torch.Tensor, scales: torch.Tensor) -> Stored:
    """Raise ValueError for scales that the kernel cannot represent."""
    if not scales.is_meta and scales.max() > LARGEST_EXPONENT:
        raise ValueError(f"{experts.weights.prefix}: scales above 2^{LARGEST_EXPONENT - 127} are not supported")
    return blocks, scales
