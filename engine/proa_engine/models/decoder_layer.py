"""A decoder's layer, declared by `LayerOptions`: attention and a feed-forward layer, each added to the running sum."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from proa_engine.kernels.products.skinny_gemm import Activation, InputForm
from proa_engine.layers.attention import Attention
from proa_engine.layers.attention_metadata import AttentionStep
from proa_engine.layers.cache_layers import CacheLayer, LayerCache
from proa_engine.layers.expert_split import ExpertSizes
from proa_engine.layers.mlp import GatedMLP
from proa_engine.layers.norm import LayerNorm, LayerNormOptions, NormOptions, ResidualSum, RMSNorm
from proa_engine.layers.parallel import LayerContext
from proa_engine.layers.weights import Weights


class Mixer(Protocol):
    """The part of a layer that lets tokens see those before: attention, or another with a cache."""

    input_form: InputForm

    @property
    def cache_layer(self) -> CacheLayer: ...

    def __call__(self, x: Activation, cache: LayerCache, step: AttentionStep) -> torch.Tensor: ...


class MixerOptions(Protocol):
    """Declares a `Mixer`: a frozen dataclass, equal for equal layers."""

    @property
    def cache_kind(self) -> type[CacheLayer]: ...

    def num_parameters(self, hidden_size: int) -> int: ...

    def num_copied(self, hidden_size: int, num_ranks: int) -> int:
        """Of the tensor parallel rank with the most parameters: those that it has beyond an equal share, because heads
        are on several ranks or cannot be divided equally."""
        ...

    def make(self, weights: Weights, context: LayerContext) -> Mixer:
        """`weights` are those of the layer."""
        ...


class FeedForward(Protocol):
    input_form: InputForm

    def __call__(self, x: Activation) -> torch.Tensor: ...


class FeedForwardOptions(Protocol):
    """Declares a `FeedForward`: a frozen dataclass, equal for equal layers."""

    @property
    def routed_experts(self) -> ExpertSizes | None: ...

    @property
    def inner_size(self) -> int:
        """Inner values that are computed for a token."""
        ...

    def num_parameters(self, hidden_size: int) -> int: ...

    def num_multiplied(self, hidden_size: int) -> int:
        """The number of parameters by which a token is multiplied."""
        ...

    def make(self, weights: Weights, context: LayerContext) -> FeedForward:
        """`weights` are those of the layer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NormNames:
    """Where a layer has norms, and what the checkpoint calls them; None: no norm there."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


PRE_NORM = NormNames(
    before_attention="input_layernorm",
    after_attention=None,
    before_mlp="post_attention_layernorm",
    after_mlp=None,
)


class Layer(Protocol):
    @property
    def cache_layers(self) -> tuple[CacheLayer, ...]: ...

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, caches: Sequence[LayerCache], step: AttentionStep
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [T, hidden_size]: what is still to be added to the sum `residual`, or the sum itself where that is None.
        `caches`: one for each of `cache_layers`. Returns both for the next layer; may overwrite both."""
        ...


class LayerDeclaration(Protocol):
    """Declares a `Layer`. `LayerOptions` is enough unless a family computes more than attention and a feed-forward
    layer."""

    @property
    def mlp(self) -> FeedForwardOptions: ...

    @property
    def routed_experts(self) -> ExpertSizes | None:
        """None: the layer has none, or `transformers` makes them."""
        ...

    @property
    def cache_kinds(self) -> tuple[type[CacheLayer], ...]:
        """The kinds of what the layer caches, or reads of an earlier layer's cache."""
        ...

    def num_parameters(self, hidden_size: int) -> int:
        """Number of values in the layer's matrices."""
        ...

    def num_copied(self, hidden_size: int, num_ranks: int) -> int:
        """As `MixerOptions.num_copied`, of the layer's attention."""
        ...

    def make(self, weights: Weights, context: LayerContext) -> Layer: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOptions:
    attention: MixerOptions
    mlp: FeedForwardOptions
    norm: NormOptions | LayerNormOptions
    norms: NormNames = PRE_NORM
    residual_scale: float = 1.0  # of the outputs of attention and of the feed-forward layer

    @property
    def routed_experts(self) -> ExpertSizes | None:
        return self.mlp.routed_experts

    @property
    def cache_kinds(self) -> tuple[type[CacheLayer], ...]:
        return (self.attention.cache_kind,)

    def num_parameters(self, hidden_size: int) -> int:
        return self.attention.num_parameters(hidden_size) + self.mlp.num_parameters(hidden_size)

    def num_copied(self, hidden_size: int, num_ranks: int) -> int:
        return self.attention.num_copied(hidden_size, num_ranks)

    def make(self, weights: Weights, context: LayerContext) -> "DecoderLayer":
        return DecoderLayer(weights, context, self)


class DecoderLayer:
    def __init__(self, weights: Weights, context: LayerContext, options: LayerOptions) -> None:
        def norm(name: str | None) -> RMSNorm | LayerNorm | None:
            return None if name is None else options.norm.make(weights / name, context.hidden_size)

        names = options.norms
        self.input_norm = norm(names.before_attention) or ResidualSum()
        self.attention = options.attention.make(weights, context)
        self.attention_norm = norm(names.after_attention)
        self.post_norm = norm(names.before_mlp) or ResidualSum()
        self.mlp = options.mlp.make(weights, context)
        self.mlp_norm = norm(names.after_mlp)
        if isinstance(self.attention, Attention) and isinstance(self.mlp, GatedMLP):
            self.attention.following += self.mlp.matrices
        self.residual_scale = options.residual_scale

    @property
    def cache_layers(self) -> tuple[CacheLayer, ...]:
        return (self.attention.cache_layer,)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, caches: Sequence[LayerCache], step: AttentionStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (cache,) = caches
        normed, residual = self.input_norm.into(self.attention.input_form, x, residual)
        x = self.attention(normed, cache, step)
        if self.attention_norm is not None:
            x = self.attention_norm(x)
        if self.residual_scale != 1.0:
            x = x.mul_(self.residual_scale)
        normed, residual = self.post_norm.into(self.mlp.input_form, x, residual)
        y = self.mlp(normed)
        if self.mlp_norm is not None:
            y = self.mlp_norm(y)
        if self.residual_scale != 1.0:
            y = y.mul_(self.residual_scale)
        return y, residual
