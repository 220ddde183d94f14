"""Decoder layers of one part: a mixer or a feed-forward layer, behind a norm, added to the running sum (Nemotron-H)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from proa_engine.layers.attention_metadata import AttentionStep
from proa_engine.layers.cache_layers import CacheLayer, LayerCache
from proa_engine.layers.expert_split import ExpertSizes
from proa_engine.layers.norm import NormOptions, RMSNorm
from proa_engine.layers.parallel import LayerContext
from proa_engine.layers.weights import Weights
from proa_engine.models.decoder_layer import FeedForward, FeedForwardOptions, MixerOptions


@dataclass(frozen=True, slots=True)
class _NoFeedForward:
    """Of a layer that is a mixer."""

    @property
    def routed_experts(self) -> ExpertSizes | None:
        return None

    @property
    def inner_size(self) -> int:
        return 0

    def num_parameters(self, hidden_size: int) -> int:
        return 0

    def num_multiplied(self, hidden_size: int) -> int:
        return 0

    def make(self, weights: Weights, context: LayerContext) -> FeedForward:
        raise AssertionError("the layer is a mixer")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerLayerOptions:
    mixer: MixerOptions
    norm: NormOptions

    @property
    def mlp(self) -> FeedForwardOptions:
        return _NoFeedForward()

    @property
    def routed_experts(self) -> ExpertSizes | None:
        return None

    @property
    def cache_kinds(self) -> tuple[type[CacheLayer], ...]:
        return (self.mixer.cache_kind,)

    def num_parameters(self, hidden_size: int) -> int:
        return self.mixer.num_parameters(hidden_size)

    def num_copied(self, hidden_size: int, num_ranks: int) -> int:
        return self.mixer.num_copied(hidden_size, num_ranks)

    def make(self, weights: Weights, context: LayerContext) -> "MixerLayer":
        return MixerLayer(weights, context, self)


class MixerLayer:
    def __init__(self, weights: Weights, context: LayerContext, options: MixerLayerOptions) -> None:
        self.norm = RMSNorm(weights / "norm", context.hidden_size, options.norm)
        self.mixer = options.mixer.make(weights, context)

    @property
    def cache_layers(self) -> tuple[CacheLayer, ...]:
        return (self.mixer.cache_layer,)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, caches: Sequence[LayerCache], step: AttentionStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (cache,) = caches
        normed, residual = self.norm.into(self.mixer.input_form, x, residual)
        return self.mixer(normed, cache, step), residual


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardLayerOptions:
    mlp: FeedForwardOptions
    norm: NormOptions

    @property
    def routed_experts(self) -> ExpertSizes | None:
        return self.mlp.routed_experts

    @property
    def cache_kinds(self) -> tuple[type[CacheLayer], ...]:
        return ()

    def num_parameters(self, hidden_size: int) -> int:
        return self.mlp.num_parameters(hidden_size)

    def num_copied(self, hidden_size: int, num_ranks: int) -> int:
        return 0

    def make(self, weights: Weights, context: LayerContext) -> "FeedForwardLayer":
        return FeedForwardLayer(weights, context, self)


class FeedForwardLayer:
    def __init__(self, weights: Weights, context: LayerContext, options: FeedForwardLayerOptions) -> None:
        self.norm = RMSNorm(weights / "norm", context.hidden_size, options.norm)
        self.mlp = options.mlp.make(weights, context)

    @property
    def cache_layers(self) -> tuple[CacheLayer, ...]:
        return ()

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, caches: Sequence[LayerCache], step: AttentionStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.norm.into(self.mlp.input_form, x, residual)
        return self.mlp(normed), residual
