"""Gemma 4's layer: experts beside the feed-forward layer, an input that each token has for this layer, and a factor."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from proa_engine.kernels.gpu_linear import make_linear
from proa_engine.kernels.moe_route import Routing, route
from proa_engine.kernels.rms_norm import rms_norm
from proa_engine.kernels.silu_and_mul import activate_and_mul
from proa_engine.layers.attention import AttentionOptions
from proa_engine.layers.attention_step import AttentionStep
from proa_engine.layers.cache_layers import KeyValueLayer, LayerCache
from proa_engine.layers.context import LayerContext
from proa_engine.layers.experts import ExpertTensors
from proa_engine.layers.mlp import GatedMLPOptions
from proa_engine.layers.norm import NormOptions, RMSNorm
from proa_engine.layers.weights import Weights


@dataclass(frozen=True, slots=True)
class Gemma4Step(AttentionStep):
    per_layer_inputs: Iterator[torch.Tensor] = field(kw_only=True)  # [T, size] for each layer, or nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4ExpertsOptions:
    num_experts: int
    expert_size: int
    routing: Routing

    def make(self, weights: Weights, context: LayerContext, norm: NormOptions) -> "Gemma4Experts":
        return Gemma4Experts(weights, context, norm, self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4LayerOptions:
    attention: AttentionOptions
    mlp: GatedMLPOptions
    norm: NormOptions
    experts: Gemma4ExpertsOptions | None
    per_layer_size: int

    @property
    def cache_kind(self) -> type[KeyValueLayer]:
        return self.attention.cache_kind

    def num_parameters(self, hidden_size: int) -> int:
        experts = 0 if self.experts is None else 3 * self.experts.num_experts * self.experts.expert_size
        rest = hidden_size * (experts + 2 * self.per_layer_size)
        return self.attention.num_parameters(hidden_size) + self.mlp.num_parameters(hidden_size) + rest

    def make(self, weights: Weights, context: LayerContext) -> "Gemma4Layer":
        return Gemma4Layer(weights, context, self)


class Gemma4Layer:
    def __init__(self, weights: Weights, context: LayerContext, options: Gemma4LayerOptions) -> None:
        def norm(name: str) -> RMSNorm:
            return RMSNorm(weights / name, context.hidden_size, options.norm)

        self.input_norm = norm("input_layernorm")
        self.attention = options.attention.make(weights, context)
        self.attention_norm = norm("post_attention_layernorm")
        self.post_norm = norm("pre_feedforward_layernorm")
        self.mlp = options.mlp.make(weights, context)
        self.mlp_norm = norm("post_feedforward_layernorm")
        self.experts = None if options.experts is None else options.experts.make(weights, context, options.norm)
        size = options.per_layer_size
        self.token_input = PerLayerInput(weights, context.hidden_size, size, options.norm) if size else None
        self.factor = weights.take("layer_scalar", (1,))

    @property
    def cache_layer(self) -> KeyValueLayer:
        return self.attention.cache_layer

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, cache: LayerCache, step: AttentionStep
    ) -> tuple[torch.Tensor, None]:
        """x [T, hidden_size], without a residual -> the same."""
        assert residual is None
        assert isinstance(step, Gemma4Step)
        normed, x = self.input_norm.into(self.attention.input_form, x, None)
        attended = self.attention_norm(self.attention(normed, cache, step))
        normed, x = self.post_norm.into(self.mlp.input_form, attended, x)
        y = self.mlp(normed)
        if self.experts is not None:
            y = self.experts(x, y)
        x = self.mlp_norm(y).add_(x)
        if self.token_input is not None:
            x = x + self.token_input(x, next(step.per_layer_inputs))
        return x.mul_(self.factor), None


class Gemma4Experts:
    """Experts that read the same input as the feed-forward layer, by norms of their own."""

    def __init__(
        self, weights: Weights, context: LayerContext, norm: NormOptions, options: Gemma4ExpertsOptions
    ) -> None:
        hidden_size = context.hidden_size
        router = weights / "router"
        self.router_scale = router.take("scale", (hidden_size,), dtype=torch.float32) * hidden_size**-0.5
        self.router = make_linear((router / "proj").take("weight", (options.num_experts, hidden_size)))
        self.routing = options.routing
        self.expert_factors = router.take("per_expert_scale", (options.num_experts,), dtype=torch.float32)
        storage = ExpertTensors(activation=partial(activate_and_mul, activation="gelu_tanh"))
        self.experts = storage.load(weights / "experts", context, options.num_experts, options.expert_size)
        self.parallel = context.parallel
        self.eps = norm.eps
        self.input_norm, self.mlp_norm, self.output_norm = (
            RMSNorm(weights / name, hidden_size, norm)
            for name in (
                "pre_feedforward_layernorm_2",
                "post_feedforward_layernorm_1",
                "post_feedforward_layernorm_2",
            )
        )

    def __call__(self, x: torch.Tensor, mlp_output: torch.Tensor) -> torch.Tensor:
        """x, mlp_output [T, hidden_size] -> the sum of the normalised outputs, [T, hidden_size]"""
        logits = self.router(rms_norm(x, self.router_scale, self.eps))
        weights, chosen = route(logits, self.routing)
        weights = weights * self.expert_factors[chosen]
        y = self.parallel.all_reduce(self.experts(self.input_norm(x), weights, chosen))
        return self.output_norm(y).add_(self.mlp_norm(mlp_output))


class PerLayerInput:
    """norm(project(gelu(gate(x)) * input))"""

    def __init__(self, weights: Weights, hidden_size: int, size: int, norm: NormOptions) -> None:
        self.gate = make_linear((weights / "per_layer_input_gate").take("weight", (size, hidden_size)))
        self.projection = make_linear((weights / "per_layer_projection").take("weight", (hidden_size, size)))
        self.norm = RMSNorm(weights / "post_per_layer_input_norm", hidden_size, norm)

    def __call__(self, x: torch.Tensor, token_input: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size], token_input [T, size] -> [T, hidden_size]"""
        gated = activate_and_mul(torch.cat((self.gate(x), token_input), dim=-1), "gelu_tanh")
        return self.norm(self.projection(gated))
