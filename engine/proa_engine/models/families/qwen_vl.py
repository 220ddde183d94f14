"""Qwen2.5-VL and Qwen3-VL: Qwen2 and Qwen3 with an image encoder and three positions a token, Qwen3 with DeepStack.

DeepStack adds features of the encoder's earlier layers behind the decoder's first layers (Meng et al., 2024, arXiv
2406.04334).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from proa_engine.layers.attention_metadata import AttentionStep
from proa_engine.layers.cache_layers import CacheLayer, LayerCache
from proa_engine.layers.expert_split import ExpertSizes
from proa_engine.layers.experts import SeparateOrTogether
from proa_engine.layers.parallel import LayerContext
from proa_engine.layers.weights import Weights
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import ImageReadingDecoder
from proa_engine.models.decoder_layer import FeedForwardOptions, Layer, LayerDeclaration
from proa_engine.models.families.qwen import Qwen2ForCausalLM, Qwen3ForCausalLM, qwen3_moe_decoder
from proa_engine.models.families.qwen_vision import QWEN2_5, QWEN3, QwenVisionOptions, read_qwen_vision
from proa_engine.models.image_files import ImageFiles

DEEPSTACK = (8, 16, 24)  # the default of `deepstack_visual_indexes`


class Qwen2_5_VLForConditionalGeneration(ImageReadingDecoder):
    defaults: ClassVar[read.Fields] = {
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "mrope_section": (16, 24, 24),
        "mrope_interleaved": False,
        "image_token_id": 151_655,
    }
    names = (
        ("merger.norm", "merger.ln_q"),
        ("merger.linear_fc1", "merger.mlp.0"),
        ("merger.linear_fc2", "merger.mlp.2"),
    )
    read_options = staticmethod(Qwen2ForCausalLM.read_options)

    @staticmethod
    def read_images(fields: read.Fields, files: ImageFiles) -> QwenVisionOptions:
        return read_qwen_vision(fields, files, QWEN2_5)


class Qwen3VLForConditionalGeneration(ImageReadingDecoder):
    defaults: ClassVar[read.Fields] = {
        "head_dim": 128,
        "max_position_embeddings": 128_000,
        "rope_theta": 500_000.0,
        "mrope_section": (24, 20, 20),
        "image_token_id": 151_655,
    }

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        return _with_deepstack(fields, Qwen3ForCausalLM.read_options(fields))

    @staticmethod
    def read_images(fields: read.Fields, files: ImageFiles) -> QwenVisionOptions:
        return read_qwen_vision(fields, files, QWEN3, DEEPSTACK)


class Qwen3VLMoeForConditionalGeneration(ImageReadingDecoder):
    # Weights of experts are always normalised, whatever the config says.
    defaults: ClassVar[read.Fields] = Qwen3VLForConditionalGeneration.defaults

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        storage = SeparateOrTogether(inputs_first=True)
        return _with_deepstack(fields, qwen3_moe_decoder({**fields, "norm_topk_prob": True}, storage))

    read_images = staticmethod(Qwen3VLForConditionalGeneration.read_images)


def _with_deepstack(fields: read.Fields, options: DecoderOptions) -> DecoderOptions:
    vision = fields.get("vision_config")
    if vision is None:
        return options
    count = len(vision.get("deepstack_visual_indexes", DEEPSTACK))
    return replace(options, layers=with_deepstack(options.layers, count), num_first_stage_layers=max(count, 1))


def with_deepstack(layers: Sequence[LayerDeclaration], count: int) -> tuple[LayerDeclaration, ...]:
    """The layers, of which the first `count` are followed by an addition."""
    first = [DeepStackOptions(layer, number + 1) for number, layer in enumerate(layers[:count])]
    return (*first, *layers[count:])


@dataclass(frozen=True, slots=True)
class DeepStackOptions:
    layer: LayerDeclaration
    place: int  # of what is added in the rows of `EmbeddedRows.embeddings`, counted in hidden sizes

    @property
    def mlp(self) -> FeedForwardOptions:
        return self.layer.mlp

    @property
    def routed_experts(self) -> ExpertSizes | None:
        return self.layer.routed_experts

    @property
    def cache_kinds(self) -> tuple[type[CacheLayer], ...]:
        return self.layer.cache_kinds

    def num_parameters(self, hidden_size: int) -> int:
        return self.layer.num_parameters(hidden_size)

    def num_copied(self, hidden_size: int, num_ranks: int) -> int:
        return self.layer.num_copied(hidden_size, num_ranks)

    def make(self, weights: Weights, context: LayerContext) -> "DeepStackLayer":
        return DeepStackLayer(self.layer.make(weights, context), self.place)


class DeepStackLayer:
    def __init__(self, layer: Layer, place: int) -> None:
        self.layer = layer
        self.place = place

    @property
    def cache_layers(self) -> tuple[CacheLayer, ...]:
        return self.layer.cache_layers

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, caches: Sequence[LayerCache], step: AttentionStep
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, residual = self.layer(x, residual, caches, step)
        images = step.metadata.media
        if images is not None:
            start = self.place * x.shape[1]
            x.index_add_(0, images.rows, images.embeddings[:, start : start + x.shape[1]])
        return x, residual
