"""DeepStack: features of an image encoder's earlier layers, added behind the decoder's first layers.

Meng et al., 2024, arXiv 2406.04334.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from proa_engine.layers.attention_step import AttentionStep
from proa_engine.layers.cache_layers import CacheLayer, LayerCache
from proa_engine.layers.context import LayerContext
from proa_engine.layers.weights import Weights
from proa_engine.models.decoder_layer import FeedForwardOptions, Layer, LayerDeclaration


def with_deepstack(layers: Sequence[LayerDeclaration], count: int) -> tuple[LayerDeclaration, ...]:
    """The layers, of which the first `count` are followed by an addition."""
    first = [DeepStackOptions(layer, number + 1) for number, layer in enumerate(layers[:count])]
    return (*first, *layers[count:])


@dataclass(frozen=True, slots=True)
class DeepStackOptions:
    layer: LayerDeclaration
    place: int  # of what is added in the rows of `ImageRows.embeddings`, counted in hidden sizes

    @property
    def mlp(self) -> FeedForwardOptions:
        return self.layer.mlp

    @property
    def cache_kind(self) -> type[CacheLayer]:
        return self.layer.cache_kind

    def num_parameters(self, hidden_size: int) -> int:
        return self.layer.num_parameters(hidden_size)

    def make(self, weights: Weights, context: LayerContext) -> "DeepStackLayer":
        return DeepStackLayer(self.layer.make(weights, context), self.place)


class DeepStackLayer:
    def __init__(self, layer: Layer, place: int) -> None:
        self.layer = layer
        self.place = place

    @property
    def cache_layer(self) -> CacheLayer:
        return self.layer.cache_layer

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, cache: LayerCache, step: AttentionStep
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, residual = self.layer(x, residual, cache, step)
        images = step.metadata.images
        if images is not None:
            start = self.place * x.shape[1]
            x.index_add_(0, images.rows, images.embeddings[:, start : start + x.shape[1]])
        return x, residual
