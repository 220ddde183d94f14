"""Mistral: Llama with a sliding window on every layer, if the config sets one."""

from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.decoder_layer import LayerOptions


class MistralForCausalLM(DecoderForCausalLM):
    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        layer = LayerOptions(
            attention=read.attention(fields, window=fields.get("sliding_window")),
            mlp=read.gated_mlp(fields),
            norm=read.norm(fields),
        )
        return DecoderOptions(layers=(layer,) * fields["num_hidden_layers"], norm=layer.norm)
