"""The gated feed-forward layer (Shazeer 2020): down(activation(gate(x)) * up(x))."""

from dataclasses import dataclass

import torch

from proa_engine.kernels.silu_and_mul import ActivationName
from proa_engine.kernels.skinny_gemm import Activation
from proa_engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear, column_projections
from proa_engine.layers.parallel import LayerContext
from proa_engine.layers.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMLPOptions:
    inner_size: int
    activation: ActivationName = "silu"
    bias: bool = False
    stored_merged: bool = False  # the checkpoint has one matrix gate_up_proj

    @property
    def num_experts(self) -> int:
        return 0

    def num_parameters(self, hidden_size: int) -> int:
        return 3 * hidden_size * self.inner_size

    def make(self, weights: Weights, context: LayerContext) -> "GatedMLP":
        return GatedMLP(weights / "mlp", context, self)


class GatedMLP:
    def __init__(self, weights: Weights, context: LayerContext, options: GatedMLPOptions) -> None:
        hidden_size, inner_size, parallel = context.hidden_size, options.inner_size, context.parallel
        projections = column_projections(
            weights,
            ("gate_proj", "up_proj"),
            hidden_size,
            (inner_size, inner_size),
            parallel,
            "gate_up_proj" if options.stored_merged else None,
        )
        self.gate_up = MergedColumnParallelLinear(projections, bias=options.bias)
        self.down = RowParallelLinear(weights / "down_proj", inner_size, hidden_size, parallel, bias=options.bias)
        self.gated = self.gate_up.gated(options.activation, self.down.input_form)
        self.parallel = parallel
        self.input_form = self.gate_up.input_form

    def __call__(self, x: Activation) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]"""
        return self.parallel.all_reduce(self.down.partial(self.gated(x)))

    def partial(self, x: Activation) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size], whose sum over the ranks is the output."""
        return self.down.partial(self.gated(x))
