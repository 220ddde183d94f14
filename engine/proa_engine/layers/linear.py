"""Linear layers sharded over tensor parallel ranks: by output features (column), or by input features (row, then
summed).

Projections of the same input are merged into one matrix: q, k and v; gate and up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from proa_engine.kernels.experts.moe import ExpertActivation, ExpertMatrices, FusedExperts, LoopedExperts
from proa_engine.kernels.experts.moe_pairs import ExpertRange
from proa_engine.kernels.fp8 import Fp8Form
from proa_engine.kernels.products.gpu_linear import GpuLinear, make_linear
from proa_engine.kernels.products.linear import Linear
from proa_engine.kernels.products.skinny_gemm import Activation, InputForm
from proa_engine.kernels.silu_and_mul import ActivationName, activate_as
from proa_engine.layers.experts import load_unquantized
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.shares import Share
from proa_engine.layers.weights import Experts, LoadedLinear, Projection, Slice, StackedExperts, Weights


@dataclass(frozen=True, slots=True)
class Unquantized:
    """The `LinearMethod` of weights that are stored and multiplied in the model's own type."""

    batch_invariant: bool = False  # for linear layers, not for experts

    @property
    def width_unit(self) -> int:
        return 1

    def load(self, projections: Sequence[Projection], bias: torch.Tensor | None) -> LoadedLinear:
        linear = make_linear(take_weight(projections), bias, batch_invariant=self.batch_invariant)
        if isinstance(linear, GpuLinear):
            return LoadedLinear(linear, linear.input_form, linear.gated)
        return LoadedLinear(linear)

    def take_matrix(self, projection: Projection) -> torch.Tensor:
        return take_weight([projection])

    def load_experts(
        self,
        gate_up: Sequence[Sequence[Projection]],
        down: Sequence[Projection],
        held: ExpertRange,
        activation: ExpertActivation,
    ) -> Experts:
        first, second = [take_weight(pair) for pair in gate_up], [take_weight([one]) for one in down]
        if first[0].is_cpu:
            looped = [Linear(weight) for weight in first], [Linear(weight) for weight in second]
            return LoopedExperts(*looped, activation, held)
        gate_up_experts, down_experts = (ExpertMatrices(torch.stack(each)) for each in (first, second))
        return FusedExperts(gate_up_experts, down_experts, activation=activation, held=held)

    def load_stacked_experts(self, experts: StackedExperts, activation: ExpertActivation) -> Experts:
        return load_unquantized(experts, activation)


def take_weight(projections: Sequence[Projection], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Take this rank's parts of matrices that are stored in `dtype` (default: the model's), concatenated: [sum of
    outputs, in_features]."""
    parts = [p.weights.take("weight", (p.out_features, p.in_features), p.part, dtype) for p in projections]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def column_projections(
    weights: Weights, names: Sequence[str], in_features: int, outputs: Sequence[Share], stored_as: str | None = None
) -> list[Projection]:
    """Projections of one input. `outputs` are this rank's shares of their outputs, in the order of `names`.

    `stored_as`: the checkpoint holds them as one matrix of that name, one after the other.
    """
    projections, total, start = [], sum(share.total for share in outputs), 0
    for name, share in zip(names, outputs, strict=True):
        if stored_as is None:
            projections.append(Projection(weights / name, share.total, in_features, share.along(0)))
        else:
            part = Slice(0, start + share.start, share.length)
            projections.append(Projection(weights / stored_as, total, in_features, part))
        start += share.total
    return projections


class MergedColumnParallelLinear:
    """Several projections of one input as one product; each rank holds its share of every projection's outputs."""

    def __init__(
        self, projections: Sequence[Projection], *, bias: bool = False, without_bias: Sequence[Projection] = ()
    ) -> None:
        """All `projections` are parts of outputs, of one model's weights (`column_projections`). For those in
        `without_bias`, of which the first is none, the checkpoint has no bias: it is 0."""
        biases: list[torch.Tensor] = []
        for p in projections if bias else ():
            if p in without_bias:
                biases.append(biases[0].new_zeros(p.part.length))
            else:
                biases.append(p.weights.take("bias", (p.out_features,), p.part))
        loaded = projections[0].weights.method.load(projections, torch.cat(biases) if bias else None)
        self.linear, self.input_form, self._gated = loaded.product, loaded.input_form, loaded.gated

    def __call__(self, x: Activation) -> torch.Tensor:
        """x [T, in_features] -> [T, this rank's outputs], those of each projection one after the other."""
        return self.linear(x)

    @property
    def matrices(self) -> tuple[torch.Tensor, ...]:
        """As `RowParallelLinear.matrices`."""
        return _matrices(self.linear)

    def gated(self, activation: ActivationName, form: InputForm) -> Callable[[Activation], Activation]:
        """The function x [T, in_features] -> activation(first) * second of two projections of one size, [T, size].

        Its result is quantized if the product after it, of the input form `form`, takes so many rows quantized, and
        the activation is a launch of its own.
        """
        linear, fused = self.linear, self._gated if activation == "silu" else None

        def activate(x: Activation) -> Activation:
            next_form = form.for_rows(x.shape[0])
            quantized = next_form if isinstance(next_form, Fp8Form) else None
            return activate_as(linear(x), activation, quantized) if fused is None else fused(x, quantized)

        return activate


class RowParallelLinear:
    """A projection whose input is sharded over the ranks; their outputs are summed."""

    def __init__(
        self,
        weights: Weights,
        inputs: Share,
        out_features: int,
        parallel: ParallelContext,
        *,
        bias: bool = False,
    ) -> None:
        """`inputs`: this rank's share of them."""
        projection = Projection(weights, out_features, inputs.total, inputs.along(1))
        # Only rank 0 adds the bias, because the ranks' outputs are summed.
        offset = weights.take("bias", (out_features,)) if bias else None
        loaded = weights.method.load([projection], offset if parallel.rank == 0 else None)
        # x [T, this rank's inputs] -> [T, out_features], whose sum over the ranks is the output.
        self.partial, self.input_form = loaded.product, loaded.input_form
        self.parallel = parallel

    @property
    def matrices(self) -> tuple[torch.Tensor, ...]:
        """The weight as it lies in memory; empty if it is more than one tensor."""
        return _matrices(self.partial)

    def __call__(self, x: Activation) -> torch.Tensor:
        """x [T, this rank's inputs] -> [T, out_features], on every rank."""
        return self.parallel.all_reduce(self.partial(x))


def _matrices(product: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
    weight = getattr(product, "weight", None)
    return (weight,) if isinstance(weight, torch.Tensor) else ()
