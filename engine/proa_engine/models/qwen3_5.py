"""Qwen3.5 (dense and mixture of experts): the layers of Qwen3-Next.

Checkpoints that also read images have the image encoder of Qwen3-VL, without DeepStack.
"""

from typing import ClassVar

from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.image_files import ImageFiles
from proa_engine.models.image_reader import ImageReadingDecoder
from proa_engine.models.qwen3_next import experts, hybrid_options
from proa_engine.models.qwen_vision import QwenVisionOptions
from proa_engine.models.qwen_vision_options import read_qwen_vision


class Qwen3_5ForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[read.Fields] = {
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "mrope_section": (11, 11, 10),
        "image_token_id": 248_056,
    }

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        read.require(fields, "attn_output_gate", (True,))
        mlps = [read.gated_mlp(fields)] * fields["num_hidden_layers"]
        return hybrid_options(fields, mlps, by_key_head=False)


class Qwen3_5MoeForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[read.Fields] = Qwen3_5ForCausalLM.defaults

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        read.require(fields, "attn_output_gate", (True,))
        mlps = [experts(fields, normalize=True)] * fields["num_hidden_layers"]
        return hybrid_options(fields, mlps, by_key_head=False)


class Qwen3_5ForConditionalGeneration(ImageReadingDecoder):
    defaults: ClassVar[read.Fields] = Qwen3_5ForCausalLM.defaults
    read_options = staticmethod(Qwen3_5ForCausalLM.read_options)

    @staticmethod
    def read_images(fields: read.Fields, files: ImageFiles) -> QwenVisionOptions:
        return read_qwen_vision(fields, files, deepstack=())


class Qwen3_5MoeForConditionalGeneration(ImageReadingDecoder):
    defaults: ClassVar[read.Fields] = Qwen3_5ForCausalLM.defaults
    read_options = staticmethod(Qwen3_5MoeForCausalLM.read_options)
    read_images = staticmethod(Qwen3_5ForConditionalGeneration.read_images)
