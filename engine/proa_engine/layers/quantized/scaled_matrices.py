"""Matrices of 8-bit numbers with scales: what the `LinearMethod`s of floats and of integers share."""

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import torch

from proa_engine.kernels.experts.moe import ExpertActivation, ExpertMatrices, FusedExperts, LoopedExperts, Product
from proa_engine.kernels.experts.moe_pairs import ExpertRange
from proa_engine.kernels.fp8 import Fp8Form
from proa_engine.kernels.int8 import Int8Form
from proa_engine.layers.experts import Biases
from proa_engine.layers.weights import Projection

Tensors = tuple[torch.Tensor, torch.Tensor]  # values [outputs, inputs] and scales of a matrix
Form = TypeVar("Form", Fp8Form, Int8Form)
# The product by a matrix: of its values, scales, bias and the form of its inputs.
MakeProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, Form], Product]


def take_scales(projections: Sequence[Projection], scale_of: Literal["tensor", "channel"]) -> torch.Tensor:
    """Take `weight_scale`, one for each matrix or one for each output -> [sum of this rank's outputs] float32"""
    return torch.cat([_scales(projection, scale_of) for projection in projections])


def _scales(projection: Projection, scale_of: Literal["tensor", "channel"]) -> torch.Tensor:
    weights = projection.weights
    if scale_of == "tensor":
        return weights.take("weight_scale", (1,), dtype=torch.float32).expand(projection.local_shape[0])
    part = projection.part if projection.part.dim == 0 else None
    return weights.take("weight_scale", (projection.out_features, 1), part, torch.float32).flatten()


def take_input_scale(projections: Sequence[Projection]) -> torch.Tensor:
    """Take `input_scale` [1] of matrices that have one input: the largest of theirs, so that none overflows."""
    scales = [p.weights.take("input_scale", (1,), dtype=torch.float32) for p in projections]
    return torch.stack(scales).amax(0)


def make_scaled_experts(
    matrices: tuple[Sequence[Tensors], Sequence[Tensors]],
    forms: tuple[Form, Form],
    product: MakeProduct[Form],
    held: ExpertRange,
    activation: ExpertActivation,
    biases: Biases = (None, None),
) -> FusedExperts | LoopedExperts:
    """`matrices`: gate and up, and down, of each held expert; `forms`: how the inputs of each are quantized.

    `product` makes the reference of one matrix, for a CPU.
    """
    if matrices[0][0][0].is_cpu:
        first, second = (_products(*each, product) for each in zip(matrices, biases, forms, strict=True))
        return LoopedExperts(first, second, activation, held)
    gate_up, down = (_stack(*each) for each in zip(matrices, biases, strict=True))
    return FusedExperts(gate_up, down, forms[0], activation, held, forms[1])


def _products(
    matrices: Sequence[Tensors], bias: torch.Tensor | None, form: Form, product: MakeProduct[Form]
) -> list[Product]:
    biases = [None] * len(matrices) if bias is None else bias
    return [product(*tensors, one, form) for tensors, one in zip(matrices, biases, strict=True)]


def _stack(matrices: Sequence[Tensors], bias: torch.Tensor | None) -> ExpertMatrices:
    weights, scales = zip(*matrices, strict=True)
    return ExpertMatrices(torch.stack(weights), torch.stack(scales), bias)
