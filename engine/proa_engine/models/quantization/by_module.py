"""The `LinearMethod` of quantized checkpoints, whose modules may have several formats, or some of them none."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from proa_engine.kernels.experts.moe import ExpertActivation
from proa_engine.kernels.experts.moe_pairs import ExpertRange
from proa_engine.layers.quantized.quant_int import IntMethod, load_int_experts
from proa_engine.layers.side_by_side import load_side_by_side
from proa_engine.layers.weights import Experts, LinearMethod, LoadedLinear, Projection, StackedExperts
from proa_engine.models.quantization.formats import Format, Quantization


@dataclass(frozen=True, slots=True)
class ByModule:
    quantization: Quantization
    methods: Mapping[Format | None, LinearMethod]  # of each of its formats

    @property
    def width_unit(self) -> int:
        return math.lcm(*(method.width_unit for method in self.methods.values()))

    def load(self, projections: Sequence[Projection], bias: torch.Tensor | None) -> LoadedLinear:
        methods = [self._method(projection) for projection in projections]
        if all(method == methods[0] for method in methods):
            return methods[0].load(projections, bias)
        return load_side_by_side(projections, methods, bias)

    def take_matrix(self, projection: Projection) -> torch.Tensor:
        return self._method(projection).take_matrix(projection)

    def load_experts(
        self,
        gate_up: Sequence[Sequence[Projection]],
        down: Sequence[Projection],
        held: ExpertRange,
        activation: ExpertActivation,
    ) -> Experts:
        first, second = self._expert_method([each for pair in gate_up for each in pair]), self._expert_method(down)
        if first == second:
            return first.load_experts(gate_up, down, held, activation)
        if isinstance(first, IntMethod) and isinstance(second, IntMethod):
            return load_int_experts(gate_up, down, (first, second), held, activation)
        raise ValueError(
            f"{gate_up[0][0].weights.prefix} and {down[0].weights.prefix} are stored in different formats, which is "
            "supported for experts only in integers whose inputs are not quantized"
        )

    def load_stacked_experts(self, experts: StackedExperts, activation: ExpertActivation) -> Experts:
        method = self.methods[self.quantization.format_of(experts.weights.prefix)]
        return method.load_stacked_experts(experts, activation)

    def _method(self, projection: Projection) -> LinearMethod:
        return self.methods[self.quantization.format_of(projection.weights.prefix)]

    def _expert_method(self, projections: Sequence[Projection]) -> LinearMethod:
        """The method of all of `projections`. Raises ValueError if they have several, or none of experts."""
        formats = {self.quantization.format_of(each.weights.prefix): each.weights.prefix for each in projections}
        if len(formats) > 1:
            raise ValueError(
                f"{' and '.join(formats.values())} are stored in different formats, which is not supported for the "
                "same matrix of a layer's experts, or their gate and up"
            )
        stored = next(iter(formats))
        if stored and stored.expert_refusal:
            raise ValueError(f"{projections[0].weights.prefix}: {stored.expert_refusal}")
        return self.methods[stored]
