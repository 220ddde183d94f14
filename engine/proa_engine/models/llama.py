"""Llama 2 and 3 (also Proa's built-in model): biases only if the config sets them."""

from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.decoder_layer import LayerOptions


class LlamaForCausalLM(DecoderForCausalLM):
    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        layer = LayerOptions(attention=read.attention(fields), mlp=read.gated_mlp(fields), norm=read.norm(fields))
        return DecoderOptions(layers=(layer,) * fields["num_hidden_layers"], norm=layer.norm)
