"""How a checkpoint stores the experts of a layer: matrix by matrix, or each matrix as one tensor of all experts.

Every rank holds a share of each expert's width, or some experts whole (`expert_split`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from proa_engine.kernels.experts.moe import ExpertActivation, ExpertMatrices, FusedExperts, LoopedExperts, Product
from proa_engine.kernels.experts.moe_pairs import ExpertRange
from proa_engine.kernels.products.linear import Linear
from proa_engine.kernels.relu_squared import ReluSquared
from proa_engine.kernels.silu_and_mul import silu_and_mul
from proa_engine.layers.expert_split import ExpertSizes, expert_range
from proa_engine.layers.parallel import LayerContext
from proa_engine.layers.shares import Share
from proa_engine.layers.weights import Experts, Projection, Slice, StackedExperts, Weights

Biases = tuple[torch.Tensor | None, torch.Tensor | None]  # of gate and up, and of down


def load_unquantized(experts: StackedExperts, activation: ExpertActivation) -> Experts:
    """Load experts that are stored and multiplied in the model's own type."""
    return make_experts(take_matrices(experts), take_biases(experts), activation, experts.held)


def make_experts(
    matrices: tuple[torch.Tensor, torch.Tensor], biases: Biases, activation: ExpertActivation, held: ExpertRange
) -> FusedExperts | LoopedExperts:
    """`matrices`: gate and up [held experts, 2N, hidden_size], and down [held experts, hidden_size, N]."""
    if not matrices[0].is_cpu:
        gate_up, down = (ExpertMatrices(weight, bias=bias) for weight, bias in zip(matrices, biases, strict=True))
        return FusedExperts(gate_up, down, activation=activation, held=held)
    first, second = (
        [Linear(weight, None if bias is None else bias[number]) for number, weight in enumerate(stacked)]
        for stacked, bias in zip(matrices, biases, strict=True)
    )
    return LoopedExperts(first, second, activation, held)


def take_matrices(experts: StackedExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gate and up [held experts, 2 * length, hidden_size], and down [held experts, hidden_size, length]."""
    hidden = (experts.hidden_size,)
    if not experts.inputs_first:
        return take_gate_up(experts, "gate_up_proj", after=hidden), take_inner(experts, "down_proj", before=hidden)
    gate_up = take_gate_up(experts, "gate_up_proj", before=hidden)
    down = take_inner(experts, "down_proj", after=hidden)
    return gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()


def take_biases(experts: StackedExperts) -> Biases:
    """[held experts, 2 * length] and, on the rank that adds it, [held experts, hidden_size]; None without biases."""
    if not experts.bias:
        return None, None
    gate_up, held = take_gate_up(experts, "gate_up_proj_bias"), experts.held
    shape, part = (held.total, experts.hidden_size), Slice(0, held.first, held.size)
    down = experts.weights.take("down_proj_bias", shape, part)
    # The ranks' outputs are summed, so one adds down's bias: the first one with a part of the expert.
    return gate_up, down if experts.start == 0 else None


def take_gate_up(
    experts: StackedExperts,
    name: str,
    *,
    before: tuple[int, ...] = (),
    after: tuple[int, ...] = (),
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Take a tensor [experts, *before, 2 * inner_size, *after] -> [held experts, *before, 2 * length, *after], gate
    before up."""
    dim, inner, length = 1 + len(before), experts.inner_size, experts.length
    shape = (experts.held.total, *before, 2 * inner, *after)
    take = experts.weights.take
    whole = Slice(0, experts.held.first, experts.held.size)
    if experts.interleaved:
        part = whole if experts.are_whole else Slice(dim, 2 * experts.start, 2 * length)
        both = take(name, shape, part, dtype)
        pairs = both.view(*both.shape[:dim], length, 2, *after)
        return pairs.transpose(dim, dim + 1).flatten(dim, dim + 1)
    if experts.are_whole:
        return take(name, shape, whole, dtype)
    parts = [take(name, shape, Slice(dim, first + experts.start, length), dtype) for first in (0, inner)]
    return torch.cat(parts, dim)


def take_inner(
    experts: StackedExperts, name: str, *, before: tuple[int, ...] = (), after: tuple[int, ...] = ()
) -> torch.Tensor:
    """Take a tensor [experts, *before, inner_size, *after] -> [held experts, *before, length, *after]."""
    shape = (experts.held.total, *before, experts.inner_size, *after)
    return experts.weights.take(name, shape, experts.inner_part(1 + len(before)))


class ExpertStorage(Protocol):
    """Declares the experts' tensors: a frozen dataclass."""

    def load(self, weights: Weights, context: LayerContext, num_experts: int, inner_size: int) -> Experts:
        """`inner_size` is that of one expert, before sharding. Raises ValueError if it cannot be sharded."""
        ...

    def sizes(self, num_experts: int, inner_size: int) -> ExpertSizes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparateExperts:
    """down(silu(gate(x)) * up(x)), the three matrices stored under each expert's number."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def load(self, weights: Weights, context: LayerContext, num_experts: int, inner_size: int) -> Experts:
        held, width = _share(num_experts, inner_size, context)
        names = (self.gate, self.up), self.down
        gate_up, down = _projections(weights, held, width, context.hidden_size, *names)
        return weights.method.load_experts(gate_up, down, held, silu_and_mul)

    def sizes(self, num_experts: int, inner_size: int) -> ExpertSizes:
        return ExpertSizes(num_experts, inner_size)


PLAIN_EXPERTS = SeparateExperts()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensors:
    """down(activation([gate(x) | up(x)])), stored as `gate_up_proj` and `down_proj` of all experts."""

    activation: ExpertActivation = silu_and_mul
    interleaved: bool = False  # rows of gate and up alternate
    inputs_first: bool = False  # unquantized matrices are [experts, inputs, outputs]
    bias: bool = False

    def load(self, weights: Weights, context: LayerContext, num_experts: int, inner_size: int) -> Experts:
        held, width = _share(num_experts, inner_size, context)
        stacked = StackedExperts(
            weights=weights,
            held=held,
            hidden_size=context.hidden_size,
            inner_size=inner_size,
            start=width.start,
            length=width.length,
            interleaved=self.interleaved,
            inputs_first=self.inputs_first,
            bias=self.bias,
        )
        return weights.method.load_stacked_experts(stacked, self.activation)

    def sizes(self, num_experts: int, inner_size: int) -> ExpertSizes:
        return ExpertSizes(num_experts, inner_size)


@dataclass(frozen=True, slots=True)
class SeparateOrTogether:
    """Stored as `ExpertTensors` if the checkpoint has these, as `SeparateExperts` if not."""

    inputs_first: bool = False  # as in `ExpertTensors`

    def load(self, weights: Weights, context: LayerContext, num_experts: int, inner_size: int) -> Experts:
        together = ExpertTensors(inputs_first=self.inputs_first)
        storage: ExpertStorage = together if weights.has("gate_up_proj") else PLAIN_EXPERTS
        return storage.load(weights, context, num_experts, inner_size)

    def sizes(self, num_experts: int, inner_size: int) -> ExpertSizes:
        return ExpertSizes(num_experts, inner_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class UngatedExperts:
    """down(relu(up(x))²), the two matrices stored under each expert's number. With a `latent_size` they read and write
    so many values, which `fc1_latent_proj` makes of the hidden state and `fc2_latent_proj` of their weighted sum."""

    latent_size: int | None = None

    def load(self, weights: Weights, context: LayerContext, num_experts: int, inner_size: int) -> Experts:
        held, width = _share(num_experts, inner_size, context)
        hidden_size, size = context.hidden_size, self.latent_size or context.hidden_size
        up, down = _projections(weights, held, width, size, ("up_proj",), "down_proj")
        experts = weights.method.load_experts(up, down, held, ReluSquared())
        if self.latent_size is None:
            return experts
        into = Projection(weights / "fc1_latent_proj", size, hidden_size, Slice(0, 0, size))
        out_of = Projection(weights / "fc2_latent_proj", hidden_size, size, Slice(0, 0, hidden_size))
        return LatentExperts(experts, *(weights.method.load([each], None).product for each in (into, out_of)))

    def sizes(self, num_experts: int, inner_size: int) -> ExpertSizes:
        return ExpertSizes(num_experts, inner_size, self.latent_size, num_matrices=2)


class LatentExperts:
    """Experts between two projections. The second one is linear, so its outputs for the ranks' own sums add up to its
    output for their total."""

    def __init__(self, experts: Experts, into: Product, out_of: Product) -> None:
        self.experts, self.into, self.out_of = experts, into, out_of

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Shapes as in `FusedExperts`."""
        return self.out_of(self.experts(self.into(x), weights, experts))


def _projections(
    weights: Weights, held: ExpertRange, width: Share, size: int, first: Sequence[str], down: str
) -> tuple[list[list[Projection]], list[Projection]]:
    """The matrices of the held experts that read `size` values, by the names in `first`, and those that write as many.
    The other experts are left to other ranks."""
    of_first, of_down = [], []
    for number in range(held.total):
        expert = weights / str(number)
        if number not in held.numbers:
            expert.leave()
            continue
        of_first.append([Projection(expert / name, width.total, size, width.along(0)) for name in first])
        of_down.append(Projection(expert / down, size, width.total, width.along(1)))
    return of_first, of_down


def _share(num_experts: int, inner_size: int, context: LayerContext) -> tuple[ExpertRange, Share]:
    """This rank's experts, and its share of the width of each."""
    parallel = context.parallel
    if context.expert_parallel:
        held = expert_range(num_experts, parallel.rank, parallel.world_size)
        return held, Share(inner_size, 0, inner_size)
    return ExpertRange.all(num_experts), parallel.part(inner_size, "inner width of an expert")
