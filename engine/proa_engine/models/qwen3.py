"""Qwen3 (dense): q and k are normalised by head; biases only if the config sets them."""

from collections.abc import Sequence

from proa_engine.layers.attention import AttentionOptions, QkNorm
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.decoder_layer import LayerOptions
from proa_engine.models.qwen2 import qwen_windows


class Qwen3ForCausalLM(DecoderForCausalLM):
    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        norm = read.norm(fields)
        layers = [
            LayerOptions(attention=attention, mlp=read.gated_mlp(fields), norm=norm)
            for attention in attention_options(fields)
        ]
        return DecoderOptions(layers=tuple(layers), norm=norm)


def attention_options(fields: read.Fields) -> Sequence[AttentionOptions]:
    """Of each layer."""
    qk_norm = QkNorm(read.norm(fields))
    return [read.attention(fields, qk_norm=qk_norm, window=window) for window in qwen_windows(fields)]
