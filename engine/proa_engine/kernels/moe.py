"""Mixture of experts: a weighted sum of the outputs of each token's k experts, which are gated feed-forward networks.

On a GPU (token, expert) pairs are sorted by expert on the device and multiplied in two launches for all experts. On a
CPU, the reference: a loop over the experts in use.
"""

from collections.abc import Callable, Sequence

import torch

from proa_engine.kernels.fp8 import Fp8Form, quantize
from proa_engine.kernels.moe_align import align_pairs
from proa_engine.kernels.moe_combine import combine_pairs
from proa_engine.kernels.moe_matmul import ExpertMatrices, moe_matmul, rows_per_block
from proa_engine.kernels.silu_and_mul import silu_and_mul, silu_and_mul_fp8

Product = Callable[..., torch.Tensor]  # [rows, inputs] -> [rows, outputs]


class FusedExperts:
    """The GPU's experts. `gate_up` holds each expert's gate and up rows; `form` is set if weights are 8-bit floats."""

    def __init__(self, gate_up: ExpertMatrices, down: ExpertMatrices, form: Fp8Form | None = None) -> None:
        self.gate_up_weight, self.gate_up_scales = gate_up.weight, gate_up.scales
        self.down_weight, self.down_scales = down.weight, down.scales
        self.form = form

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """x [T, N]; weights [T, k] float32 and experts [T, k] int32 from `route` -> [T, N]"""
        (num_tokens, k), num_experts = experts.shape, self.gate_up_weight.shape[0]
        blocks = align_pairs(experts, num_experts, rows_per_block(experts.numel(), num_experts))
        gate_up = ExpertMatrices(self.gate_up_weight, self.gate_up_scales)
        down = ExpertMatrices(self.down_weight, self.down_scales)
        hidden = moe_matmul(x if self.form is None else quantize(x, self.form), gate_up, blocks, None, k)
        active = silu_and_mul(hidden) if self.form is None else silu_and_mul_fp8(hidden, self.form)
        return combine_pairs(moe_matmul(active, down, blocks, weights, k).view(num_tokens, k, -1))


class LoopedExperts:
    """The CPU's experts, and the reference: one product for `gate_up` and one for `down` of each expert."""

    def __init__(self, gate_up: Sequence[Product], down: Sequence[Product]) -> None:
        self.gate_up = list(gate_up)
        self.down = list(down)

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Shapes as in `FusedExperts`."""
        pairs = torch.empty((*experts.shape, x.shape[1]), dtype=x.dtype)
        for expert in experts.unique().tolist():
            token, choice = (experts == expert).nonzero(as_tuple=True)
            y = self.down[expert](silu_and_mul(self.gate_up[expert](x[token])))
            pairs[token, choice] = (y * weights[token, choice, None]).to(x.dtype)
        return combine_pairs(pairs)
