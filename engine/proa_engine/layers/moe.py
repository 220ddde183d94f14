"""Mixture of experts in place of the feed-forward layer; every rank holds a share of each expert's width."""

import torch

from proa_engine.kernels.activation import Activation
from proa_engine.kernels.gpu_linear import make_linear
from proa_engine.kernels.moe_route import route
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Projection, Slice, Weights


class SparseMoE:
    """The weighted sum of down(silu(gate(x)) * up(x)) over the `num_chosen` experts with the largest router logits."""

    def __init__(
        self,
        weights: Weights,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_chosen: int,
        parallel: ParallelContext,
        *,
        normalize: bool,
    ) -> None:
        """`intermediate_size` is that of one expert. `normalize`: scale each token's weights to sum to 1."""
        self.router = make_linear((weights / "gate").take("weight", (num_experts, hidden_size)))
        size = parallel.share(intermediate_size, "inner width of an expert")
        start = parallel.rank * size
        gate_up, down = [], []
        for number in range(num_experts):
            expert = weights / "experts" / str(number)
            gate_up.append(
                [
                    Projection(expert / name, intermediate_size, hidden_size, Slice(0, start, size))
                    for name in ("gate_proj", "up_proj")
                ]
            )
            down.append(Projection(expert / "down_proj", hidden_size, intermediate_size, Slice(1, start, size)))
        self.experts = weights.method.load_experts(gate_up, down)
        self.num_chosen = num_chosen
        self.normalize = normalize
        self.parallel = parallel
        self.input_form = None  # the router needs the plain tensor

    def __call__(self, x: Activation) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]"""
        assert isinstance(x, torch.Tensor)
        chosen_weights, chosen = route(self.router(x), self.num_chosen, normalize=self.normalize)
        return self.parallel.all_reduce(self.experts(x, chosen_weights, chosen))
