"""Mixture of experts in place of the feed-forward layer; every rank holds a share of each expert's width."""

from dataclasses import dataclass

import torch

from proa_engine.kernels.activation import Activation, InputForm
from proa_engine.kernels.gpu_linear import make_linear
from proa_engine.kernels.moe import GatedActivation
from proa_engine.kernels.moe_route import Routing, route
from proa_engine.kernels.silu_and_mul import silu_and_mul
from proa_engine.layers.context import LayerContext
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Experts, Projection, Slice, StackedExperts, Weights

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEOptions:
    """Declares experts whose matrices are stored one by one, with a router named `gate`."""

    num_experts: int
    expert_size: int  # inner width of each expert
    routing: Routing

    @property
    def inner_size(self) -> int:
        return self.routing.num_chosen * self.expert_size

    def num_parameters(self, hidden_size: int) -> int:
        return 3 * hidden_size * self.expert_size * self.num_experts

    def make(self, weights: Weights, context: LayerContext) -> "SparseMoE":
        moe, sizes = weights / "mlp", (context.hidden_size, self.expert_size, self.num_experts)
        router = Router(moe / "gate", context.hidden_size, self.num_experts, self.routing)
        return SparseMoE(router, load_experts(moe / "experts", *sizes, context.parallel), context.parallel)


class Router:
    """Chooses the experts of each token, on every rank alike."""

    def __init__(
        self,
        weights: Weights,
        hidden_size: int,
        num_experts: int,
        routing: Routing,
        *,
        bias: bool = False,
        correction: str | None = None,
    ) -> None:
        """`correction`: name of the tensor [num_experts] that is added to the scores for the choice alone."""
        routing.check(num_experts)
        offset = weights.take("bias", (num_experts,)) if bias else None
        self.linear = make_linear(weights.take("weight", (num_experts, hidden_size)), offset)
        self.correction = weights.take(correction, (num_experts,), dtype=torch.float32) if correction else None
        self.routing = routing

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden_size] -> weights [T, k] float32 and experts [T, k] int32"""
        return route(self.linear(x), self.routing, self.correction)


class SparseMoE:
    """The weighted sum of the outputs of the experts that the router chooses for each token."""

    def __init__(self, router: Router, experts: Experts, parallel: ParallelContext) -> None:
        self.router = router
        self.experts = experts
        self.parallel = parallel
        self.input_form: InputForm | None = None  # the router needs the plain tensor

    def __call__(self, x: Activation) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]"""
        assert isinstance(x, torch.Tensor)
        return self.parallel.all_reduce(self.experts(x, *self.router(x)))


def load_experts(
    weights: Weights,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    parallel: ParallelContext,
    names: tuple[str, str, str] = GATE_UP_DOWN,
) -> Experts:
    """Load down(silu(gate(x)) * up(x)), stored by expert: matrices `names` (gate, up, down) under each number.

    `intermediate_size` is that of one expert.
    """
    size = parallel.share(intermediate_size, "inner width of an expert")
    start = parallel.rank * size
    gate_up, down = [], []
    for number in range(num_experts):
        expert = weights / str(number)
        gate_up.append(
            [Projection(expert / name, intermediate_size, hidden_size, Slice(0, start, size)) for name in names[:2]]
        )
        down.append(Projection(expert / names[2], hidden_size, intermediate_size, Slice(1, start, size)))
    return weights.method.load_experts(gate_up, down)


def load_stacked_experts(
    weights: Weights,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    parallel: ParallelContext,
    activation: GatedActivation = silu_and_mul,
    *,
    interleaved: bool = False,
    inputs_first: bool = False,
    bias: bool = False,
) -> Experts:
    """Load down(activation([gate(x) | up(x)])), each matrix stored as one tensor of all experts; see
    `StackedExperts`."""
    size = parallel.share(intermediate_size, "inner width of an expert")
    stacked = StackedExperts(
        weights=weights,
        num_experts=num_experts,
        hidden_size=hidden_size,
        inner_size=intermediate_size,
        start=parallel.rank * size,
        length=size,
        interleaved=interleaved,
        inputs_first=inputs_first,
        bias=bias,
    )
    return weights.method.load_stacked_experts(stacked, activation)
