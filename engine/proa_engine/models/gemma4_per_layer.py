"""Gemma 4's inputs for each layer: an embedding of the token, and a projection of its embedding for the first layer."""

import torch

from proa_engine.kernels.gpu_linear import make_linear
from proa_engine.layers.embedding import VocabParallelEmbedding, take_vocab_share
from proa_engine.layers.norm import NormOptions, RMSNorm
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Weights


class PerLayerInputs:
    def __init__(
        self,
        weights: Weights,
        hidden_size: int,
        num_layers: int,
        size: int,
        vocab_size: int,
        norm: NormOptions,
        parallel: ParallelContext,
    ) -> None:
        width = num_layers * size
        rows = take_vocab_share(weights / "embed_tokens_per_layer", vocab_size, width, parallel)
        self.embedding = VocabParallelEmbedding(rows, parallel)
        self.embedding_scale = float(torch.tensor(size**0.5, dtype=rows.dtype))
        self.projection = make_linear((weights / "per_layer_model_projection").take("weight", (width, hidden_size)))
        self.projection_scale = hidden_size**-0.5
        self.norm = RMSNorm(weights / "per_layer_projection_norm", size, norm)
        self.shape = num_layers, size

    def __call__(self, input_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """input_ids [T] int64, x [T, hidden_size] -> [num_layers, T, size]"""
        embedded = self.embedding(input_ids).mul_(self.embedding_scale).view(-1, *self.shape)
        projected = self.norm(self.projection(x).mul_(self.projection_scale).view(-1, *self.shape))
        return projected.add_(embedded).mul_(2**-0.5).transpose(0, 1)
