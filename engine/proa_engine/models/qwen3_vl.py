"""Qwen3-VL (dense and mixture of experts): Qwen3 with an image encoder, DeepStack, and three positions a token."""

from dataclasses import replace
from typing import ClassVar

from proa_engine.layers.experts import SeparateOrTogether
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.deepstack import with_deepstack
from proa_engine.models.image_files import ImageFiles
from proa_engine.models.image_reader import ImageReadingDecoder
from proa_engine.models.qwen3 import Qwen3ForCausalLM
from proa_engine.models.qwen3_moe import moe_options
from proa_engine.models.qwen_vision import QwenVisionOptions
from proa_engine.models.qwen_vision_options import read_qwen_vision

DEEPSTACK = (8, 16, 24)  # the default of `deepstack_visual_indexes`


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
        return read_qwen_vision(fields, files, DEEPSTACK)


class Qwen3VLMoeForConditionalGeneration(ImageReadingDecoder):
    # Weights of experts are always normalised, whatever the config says.
    defaults: ClassVar[read.Fields] = Qwen3VLForConditionalGeneration.defaults

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        storage = SeparateOrTogether(inputs_first=True)
        return _with_deepstack(fields, moe_options({**fields, "norm_topk_prob": True}, storage))

    read_images = staticmethod(Qwen3VLForConditionalGeneration.read_images)


def _with_deepstack(fields: read.Fields, options: DecoderOptions) -> DecoderOptions:
    vision = fields.get("vision_config")
    if vision is None:
        return options
    count = len(vision.get("deepstack_visual_indexes", DEEPSTACK))
    return replace(options, layers=with_deepstack(options.layers, count))
