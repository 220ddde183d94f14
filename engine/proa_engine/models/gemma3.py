"""Gemma 3 (text): Gemma 2 with q/k norms, and full attention in every sixth layer, which alone has a scaled rotation.

Of checkpoints that also read images, only the text model is loaded.
"""

from typing import ClassVar

from proa_engine.layers.attention import QkNorm
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.gemma2 import gemma_options


class Gemma3ForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[read.Fields] = {
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


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """Gemma 3 with an image encoder, which is not loaded."""
