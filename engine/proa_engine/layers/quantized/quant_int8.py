"""The `LinearMethod` of 8-bit integers: compressed-tensors' int-quantized, with 8-bit integers for activations too.

The products are in `kernels.products.int8_linear`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from proa_engine.kernels.experts.moe import ExpertActivation
from proa_engine.kernels.experts.moe_pairs import ExpertRange
from proa_engine.kernels.int8 import HIGHEST, LOWEST, NUM_STEPS, Int8Form
from proa_engine.kernels.products.int8_linear import Int8Linear
from proa_engine.layers.expert_refusals import no_stacked_experts
from proa_engine.layers.linear import take_weight
from proa_engine.layers.quantized.scaled_matrices import Tensors, make_scaled_experts, take_input_scale, take_scales
from proa_engine.layers.weights import Experts, LoadedLinear, Projection, StackedExperts


@dataclass(frozen=True, slots=True)
class StoredInt8:
    """`weight` as symmetric 8-bit integers with `weight_scale`, one for the tensor or one for each output.

    Activations have the checkpoint's `input_scale` and, if asymmetric, `input_zero_point` if `static`; else each token
    has its own.
    """

    scale_of: Literal["tensor", "channel"]
    static: bool
    symmetric: bool  # activations

    @property
    def width_unit(self) -> int:
        return 1

    def load(self, projections: Sequence[Projection], bias: torch.Tensor | None) -> LoadedLinear:
        return LoadedLinear(Int8Linear(*self._tensors(projections), bias, self._form(projections)))

    def take_matrix(self, projection: Projection) -> torch.Tensor:
        values, scales = self._tensors([projection])
        return values.float() * scales[:, None]

    def load_experts(
        self,
        gate_up: Sequence[Sequence[Projection]],
        down: Sequence[Projection],
        held: ExpertRange,
        activation: ExpertActivation,
    ) -> Experts:
        assert self.symmetric
        forms = self._form([each for pair in gate_up for each in pair]), self._form(down)
        matrices = [self._tensors(pair) for pair in gate_up], [self._tensors([one]) for one in down]
        return make_scaled_experts(matrices, forms, Int8Linear, held, activation)

    def load_stacked_experts(self, experts: StackedExperts, activation: ExpertActivation) -> Experts:
        raise no_stacked_experts(experts.weights.prefix)

    def _tensors(self, projections: Sequence[Projection]) -> Tensors:
        """This rank's parts of the matrices, concatenated."""
        return take_weight(projections, torch.int8), take_scales(projections, self.scale_of)

    def _form(self, projections: Sequence[Projection]) -> Int8Form:
        if not self.static:
            return Int8Form(self.symmetric)
        if self.symmetric:
            return Int8Form(scale=take_input_scale(projections))
        return _asymmetric(projections)


def _asymmetric(projections: Sequence[Projection]) -> Int8Form:
    """The form whose range holds the ranges of all `projections`, which have one input."""
    ranges = []
    for projection in projections:
        scale = projection.weights.take("input_scale", (1,), dtype=torch.float32)
        zero = projection.weights.take("input_zero_point", (1,), dtype=torch.int8)
        ranges.append(torch.cat([(LOWEST - zero.float()) * scale, (HIGHEST - zero.float()) * scale]))
    least, most = torch.stack(ranges).amin(0)[:1], torch.stack(ranges).amax(0)[1:]
    scale = (most - least) / NUM_STEPS
    return Int8Form(symmetric=False, scale=scale, zero=(LOWEST - least / scale).round().to(torch.int32))
