"""Read this rank's share of the tensors that hold the matrices or biases of all experts."""

import torch

from proa_engine.kernels.linear import Linear
from proa_engine.kernels.moe import ExpertActivation, FusedExperts, LoopedExperts
from proa_engine.kernels.moe_matmul import ExpertMatrices
from proa_engine.layers.weights import Experts, Slice, StackedExperts

Biases = tuple[torch.Tensor | None, torch.Tensor | None]  # of gate and up, and of down


def load_unquantized(experts: StackedExperts, activation: ExpertActivation) -> Experts:
    """Load experts that are stored and multiplied in the model's own type."""
    return make_experts(take_matrices(experts), take_biases(experts), activation)


def make_experts(
    matrices: tuple[torch.Tensor, torch.Tensor], biases: Biases, activation: ExpertActivation
) -> FusedExperts | LoopedExperts:
    """`matrices`: gate and up [experts, 2N, hidden_size], and down [experts, hidden_size, N]."""
    if not matrices[0].is_cpu:
        gate_up, down = (ExpertMatrices(weight, bias=bias) for weight, bias in zip(matrices, biases, strict=True))
        return FusedExperts(gate_up, down, activation=activation)
    first, second = (
        [Linear(weight, None if bias is None else bias[number]) for number, weight in enumerate(stacked)]
        for stacked, bias in zip(matrices, biases, strict=True)
    )
    return LoopedExperts(first, second, activation)


def take_matrices(experts: StackedExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gate and up [experts, 2 * length, hidden_size], and down [experts, hidden_size, length]."""
    hidden = (experts.hidden_size,)
    if not experts.inputs_first:
        return take_gate_up(experts, "gate_up_proj", after=hidden), take_inner(experts, "down_proj", before=hidden)
    gate_up = take_gate_up(experts, "gate_up_proj", before=hidden)
    down = take_inner(experts, "down_proj", after=hidden)
    return gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()


def take_biases(experts: StackedExperts) -> Biases:
    """[experts, 2 * length] and, on the rank that adds it, [experts, hidden_size]; None without biases."""
    if not experts.bias:
        return None, None
    gate_up = take_gate_up(experts, "gate_up_proj_bias")
    down = experts.weights.take("down_proj_bias", (experts.num_experts, experts.hidden_size))
    # Only rank 0 adds down's bias, because the ranks' outputs are summed.
    return gate_up, down if experts.start == 0 else None


def take_gate_up(
    experts: StackedExperts,
    name: str,
    *,
    before: tuple[int, ...] = (),
    after: tuple[int, ...] = (),
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Take a tensor [experts, *before, 2 * inner_size, *after] -> [experts, *before, 2 * length, *after], gate before
    up."""
    dim, inner, length = 1 + len(before), experts.inner_size, experts.length
    shape = (experts.num_experts, *before, 2 * inner, *after)
    take = experts.weights.take
    if experts.interleaved:
        both = take(name, shape, Slice(dim, 2 * experts.start, 2 * length), dtype)
        pairs = both.view(*both.shape[:dim], length, 2, *after)
        return pairs.transpose(dim, dim + 1).flatten(dim, dim + 1)
    parts = [take(name, shape, Slice(dim, first + experts.start, length), dtype) for first in (0, inner)]
    return torch.cat(parts, dim)


def take_inner(
    experts: StackedExperts, name: str, *, before: tuple[int, ...] = (), after: tuple[int, ...] = ()
) -> torch.Tensor:
    """Take a tensor [experts, *before, inner_size, *after] -> [experts, *before, length, *after]."""
    shape = (experts.num_experts, *before, experts.inner_size, *after)
    return experts.weights.take(name, shape, Slice(1 + len(before), experts.start, experts.length))
