"""The gated feed-forward layer (SwiGLU, Shazeer 2020): down(silu(gate(x)) * up(x))."""

import torch

from proa_engine.kernels.activation import Activation
from proa_engine.kernels.fp8 import Fp8Form
from proa_engine.kernels.silu_and_mul import silu_and_mul_fp8
from proa_engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Weights


class GatedMLP:
    def __init__(
        self, weights: Weights, hidden_size: int, intermediate_size: int, parallel: ParallelContext, *, bias: bool
    ) -> None:
        widths = (intermediate_size, intermediate_size)
        self.gate_up = MergedColumnParallelLinear(
            weights, ("gate_proj", "up_proj"), hidden_size, widths, parallel, bias=bias
        )
        self.down = RowParallelLinear(weights / "down_proj", intermediate_size, hidden_size, parallel, bias=bias)
        self.input_form = self.gate_up.input_form

    def __call__(self, x: Activation) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]"""
        form = self.down.input_form
        if isinstance(form, Fp8Form):
            return self.down(silu_and_mul_fp8(self.gate_up(x), form))
        return self.down(self.gate_up.gated(x))
