"""Feed-forward layers: gated (Shazeer 2020), down(activation(gate(x)) * up(x)), without a gate,
down(activation(up(x))), and mixtures of experts in their place.

A mixture has routed experts, and shared ones that every token uses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from proa_engine.kernels.experts.moe_route import Routing
from proa_engine.kernels.experts.moe_router import GpuRouter, Router, make_router
from proa_engine.kernels.products.gpu_linear import make_linear
from proa_engine.kernels.products.skinny_gemm import Activation
from proa_engine.kernels.relu_squared import relu_squared
from proa_engine.kernels.sigmoid_gate import add_gated
from proa_engine.kernels.silu_and_mul import ActivationName
from proa_engine.layers.expert_split import ExpertSizes
from proa_engine.layers.experts import PLAIN_EXPERTS, ExpertStorage
from proa_engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear, column_projections
from proa_engine.layers.parallel import LayerContext, ParallelContext
from proa_engine.layers.weights import Experts, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMLPOptions:
    inner_size: int
    activation: ActivationName = "silu"
    bias: bool = False
    stored_merged: bool = False  # the checkpoint has one matrix gate_up_proj

    @property
    def routed_experts(self) -> ExpertSizes | None:
        return None

    def num_parameters(self, hidden_size: int) -> int:
        return 3 * hidden_size * self.inner_size

    def num_multiplied(self, hidden_size: int) -> int:
        return self.num_parameters(hidden_size)

    def make(self, weights: Weights, context: LayerContext) -> "GatedMLP":
        return self.load(weights / "mlp", context)

    def load(self, weights: Weights, context: LayerContext) -> "GatedMLP":
        """`weights` are its own."""
        return GatedMLP(weights, context, self)


class GatedMLP:
    def __init__(self, weights: Weights, context: LayerContext, options: GatedMLPOptions) -> None:
        hidden_size, parallel = context.hidden_size, context.parallel
        inner = parallel.width(options.inner_size, weights.method.width_unit, f"inner width of {weights.prefix}")
        stored_as = "gate_up_proj" if options.stored_merged else None
        projections = column_projections(weights, ("gate_proj", "up_proj"), hidden_size, (inner, inner), stored_as)
        self.gate_up = MergedColumnParallelLinear(projections, bias=options.bias)
        self.down = RowParallelLinear(weights / "down_proj", inner, hidden_size, parallel, bias=options.bias)
        self.gated = self.gate_up.gated(options.activation, self.down.input_form)
        self.parallel = parallel
        self.input_form = self.gate_up.input_form

    @property
    def matrices(self) -> tuple[torch.Tensor, ...]:
        """The weights that are one tensor, in the order of their use."""
        return self.gate_up.matrices + self.down.matrices

    def __call__(self, x: Activation) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]"""
        return self.parallel.all_reduce(self.down.partial(self.gated(x)))

    def partial(self, x: Activation) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size], whose sum over the ranks is the output."""
        return self.down.partial(self.gated(x))


@dataclass(frozen=True, slots=True, kw_only=True)
class UngatedMLPOptions:
    inner_size: int
    activation: Literal["relu_squared", "gelu"] = "relu_squared"
    bias: bool = False

    @property
    def routed_experts(self) -> ExpertSizes | None:
        return None

    def num_parameters(self, hidden_size: int) -> int:
        return 2 * hidden_size * self.inner_size

    def num_multiplied(self, hidden_size: int) -> int:
        return self.num_parameters(hidden_size)

    def make(self, weights: Weights, context: LayerContext) -> "UngatedMLP":
        return self.load(weights / "mlp", context)

    def load(self, weights: Weights, context: LayerContext) -> "UngatedMLP":
        """`weights` are its own."""
        return UngatedMLP(weights, context, self)


class UngatedMLP:
    def __init__(self, weights: Weights, context: LayerContext, options: UngatedMLPOptions) -> None:
        hidden_size, parallel = context.hidden_size, context.parallel
        inner = parallel.width(options.inner_size, weights.method.width_unit, f"inner width of {weights.prefix}")
        projections = column_projections(weights, ("up_proj",), hidden_size, (inner,))
        self.up = MergedColumnParallelLinear(projections, bias=options.bias)
        self.down = RowParallelLinear(weights / "down_proj", inner, hidden_size, parallel, bias=options.bias)
        self.activate: Callable[[torch.Tensor], torch.Tensor] = relu_squared
        if options.activation == "gelu":
            self.activate = F.gelu
        self.input_form = self.up.input_form

    def __call__(self, x: Activation) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]"""
        return self.down.parallel.all_reduce(self.partial(x))

    def partial(self, x: Activation) -> torch.Tensor:
        """As `GatedMLP.partial`."""
        return self.down.partial(self.activate(self.up(x)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    routing: Routing
    name: str = "gate"
    bias: bool = False
    correction: str | None = None  # name of the tensor that is added to the scores for the choice alone

    def make(self, weights: Weights, hidden_size: int, num_experts: int) -> Router | GpuRouter:
        """Every rank has the whole router."""
        self.routing.check(num_experts)
        own = weights / self.name
        bias = own.take("bias", (num_experts,)) if self.bias else None
        weight, correction = own.take("weight", (num_experts, hidden_size)), None
        if self.correction is not None:
            correction = own.take(self.correction, (num_experts,), dtype=torch.float32)
        return make_router(weight, bias, self.routing, correction)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpertOptions:
    """A feed-forward layer whose output is added to that of the routed experts."""

    mlp: GatedMLPOptions | UngatedMLPOptions
    name: str = "shared_experts"
    gate: str | None = None  # name of the matrix [1, hidden_size]: sigmoid(gate(x)) scales the output

    def make(self, weights: Weights, context: LayerContext) -> "SharedExpert":
        gate = None if self.gate is None else (weights / self.gate).take("weight", (1, context.hidden_size))
        return SharedExpert(self.mlp.load(weights / self.name, context), gate)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEOptions:
    num_experts: int
    expert_size: int  # inner width of each expert
    router: RouterOptions
    experts: ExpertStorage = PLAIN_EXPERTS
    shared: SharedExpertOptions | None = None
    name: str = "mlp"

    @property
    def routed_experts(self) -> ExpertSizes:
        return self.experts.sizes(self.num_experts, self.expert_size)

    @property
    def inner_size(self) -> int:
        shared = 0 if self.shared is None else self.shared.mlp.inner_size
        return self.router.routing.num_chosen * self.expert_size + shared

    def num_parameters(self, hidden_size: int) -> int:
        shared = 0 if self.shared is None else self.shared.mlp.num_parameters(hidden_size)
        return self.routed_experts.num_parameters(hidden_size) + shared

    def num_multiplied(self, hidden_size: int) -> int:
        shared = 0 if self.shared is None else self.shared.mlp.num_multiplied(hidden_size)
        routed = self.routed_experts.num_parameters(hidden_size)
        return self.router.routing.num_chosen * routed // self.num_experts + shared

    def make(self, weights: Weights, context: LayerContext) -> "SparseMoE":
        moe = weights / self.name
        return SparseMoE(
            self.router.make(moe, context.hidden_size, self.num_experts),
            self.experts.load(moe / "experts", context, self.num_experts, self.expert_size),
            None if self.shared is None else self.shared.make(moe, context),
            context.parallel,
        )


class SharedExpert:
    def __init__(self, mlp: GatedMLP | UngatedMLP, gate: torch.Tensor | None) -> None:
        self.mlp = mlp
        self.gate = None if gate is None else make_linear(gate)

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """Add the output of x [T, hidden_size], whose sum over the ranks it is, to `total` [T, hidden_size]."""
        y = self.mlp.partial(x)
        if self.gate is None:
            total += y
        else:
            add_gated(total, y, x, self.gate)


class SparseMoE:
    """The weighted sum of the outputs of the experts that the router chooses for each token, and the shared output."""

    def __init__(
        self, router: Router | GpuRouter, experts: Experts, shared: SharedExpert | None, parallel: ParallelContext
    ) -> None:
        self.router = router
        self.experts = experts
        self.shared = shared
        self.parallel = parallel
        self.input_form = router.input_form

    def __call__(self, x: Activation) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]"""
        normed, weights, experts = self.router(x)
        y = self.experts(normed, weights, experts)
        if self.shared is not None:
            self.shared.add_to(y, normed)
        return self.parallel.all_reduce(y)
