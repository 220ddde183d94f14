"""Mixture of experts: a weighted sum of the outputs of each token's k experts, which are gated feed-forward networks.

On a GPU (token, expert) pairs are sorted by expert on the device and multiplied in two launches for all experts. On a
CPU, the reference: a loop over the experts in use.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from proa_engine.kernels.fp8 import Fp8Form, QuantizedRows, quantize
from proa_engine.kernels.moe_matmul import rows_per_block
from proa_engine.kernels.moe_pairs import ExpertBlocks, align_pairs, combine_pairs
from proa_engine.kernels.silu_and_mul import silu_and_mul, silu_and_mul_fp8

Product = Callable[..., torch.Tensor]  # [rows, inputs] -> [rows, outputs]
ExpertActivation = Callable[[torch.Tensor], torch.Tensor]  # [rows, 2N] of [gate | up] -> [rows, N]


class StackedMatrices(Protocol):
    """One matrix of every expert: `ExpertMatrices`, or another type of numbers."""

    @property
    def num_experts(self) -> int: ...

    def multiply(
        self, x: torch.Tensor | QuantizedRows, blocks: ExpertBlocks, pair_weights: torch.Tensor | None, k: int
    ) -> torch.Tensor:
        """As `ExpertMatrices.multiply`."""
        ...


class FusedExperts:
    """The GPU's experts. `gate_up` holds each expert's gate and up rows; `form` is set if weights are 8-bit floats."""

    def __init__(
        self,
        gate_up: StackedMatrices,
        down: StackedMatrices,
        form: Fp8Form | None = None,
        activation: ExpertActivation = silu_and_mul,
    ) -> None:
        self.gate_up = gate_up
        self.down = down
        self.form = form
        self.activation = activation

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """x [T, N]; weights [T, k] float32 and experts [T, k] int32 from `route` -> [T, N]"""
        (num_tokens, k), num_experts = experts.shape, self.gate_up.num_experts
        blocks = align_pairs(experts, num_experts, rows_per_block(experts.numel(), num_experts))
        hidden = self.gate_up.multiply(x if self.form is None else quantize(x, self.form), blocks, None, k)
        return combine_pairs(self.down.multiply(self._active(hidden), blocks, weights, k).view(num_tokens, k, -1))

    def _active(self, hidden: torch.Tensor) -> torch.Tensor | QuantizedRows:
        if self.form is None:
            return self.activation(hidden)
        if self.activation is silu_and_mul:
            return silu_and_mul_fp8(hidden, self.form)
        return quantize(self.activation(hidden), self.form)


class LoopedExperts:
    """The CPU's experts, and the reference: one product for `gate_up` and one for `down` of each expert."""

    def __init__(
        self, gate_up: Sequence[Product], down: Sequence[Product], activation: ExpertActivation = silu_and_mul
    ) -> None:
        self.gate_up = list(gate_up)
        self.down = list(down)
        self.activation = activation

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Shapes as in `FusedExperts`."""
        pairs = torch.empty((*experts.shape, x.shape[1]), dtype=x.dtype)
        for expert in experts.unique().tolist():
            token, choice = (experts == expert).nonzero(as_tuple=True)
            y = self.down[expert](self.activation(self.gate_up[expert](x[token])))
            pairs[token, choice] = (y * weights[token, choice, None]).to(x.dtype)
        return combine_pairs(pairs)
