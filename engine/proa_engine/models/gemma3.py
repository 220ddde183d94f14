"""Gemma 3: Gemma 2 with q/k norms, and full attention in every sixth layer, which alone has a scaled rotation.

With images, whose tokens attend to all of their image in every layer. In layers with a window, the window still ends a
token's sight to the left: of an image wider than the window it sees a part, as in `transformers`.
"""

from typing import Any, ClassVar

from proa_engine.layers.attention import QkNorm
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.gemma2 import gemma_options
from proa_engine.models.gemma_vision import GemmaVisionOptions
from proa_engine.models.gemma_vision_options import read_gemma_vision
from proa_engine.models.image_files import ImageFiles
from proa_engine.models.image_reader import ImageReadingDecoder


class Gemma3ForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    }

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        read.require(fields, "attn_logit_softcapping", ())
        types = read.layer_types(fields, read.every(fields["sliding_window_pattern"], fields))
        ropes = read.ropes(fields, sliding_theta=fields["rope_local_base_freq"])
        return gemma_options(fields, types, ropes, qk_norm=QkNorm(read.norm(fields, offset=1.0)))


class Gemma3ForConditionalGeneration(ImageReadingDecoder):
    defaults: ClassVar[read.Fields] = Gemma3ForCausalLM.defaults | {
        "boi_token_index": 255_999,
        "eoi_token_index": 256_000,
        "image_token_index": 262_144,
        "mm_tokens_per_image": 256,
    }

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        return Gemma3ForCausalLM.read_options(fields)

    @staticmethod
    def read_images(fields: read.Fields, files: ImageFiles) -> GemmaVisionOptions:
        return read_gemma_vision(fields, files)
