"""ImageReadingDecoder: a decoder that reads images."""

import torch

from proa_engine.layers.attention_metadata import AttentionMetadata
from proa_engine.layers.attention_step import AttentionStep
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Weights
from proa_engine.models.base import ImageEncoder
from proa_engine.models.config import ModelConfig
from proa_engine.models.decoder import DecoderForCausalLM


class ImageReadingDecoder(DecoderForCausalLM):
    """An `ImageReader` if its configuration has an image encoder, a model of text otherwise.

    An architecture that derives from it has `read_images` (`registry.ImageModelClass`).
    """

    image_encoder: ImageEncoder

    def __init__(self, config: ModelConfig, weights: Weights, parallel: ParallelContext) -> None:
        super().__init__(config, weights, parallel)
        if config.image_encoder is not None:
            self.image_encoder = config.image_encoder.make(weights)

    def begin(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> tuple[torch.Tensor, AttentionStep]:
        x, step = super().begin(input_ids, positions, metadata)
        if metadata.images is not None:
            x.index_copy_(0, metadata.images.rows, metadata.images.embeddings[:, : x.shape[1]])
        return x, step
