"""Seed-OSS: Llama whose attention has biases on the inputs and the output by two fields."""

from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.decoder_layer import LayerOptions


class SeedOssForCausalLM(DecoderForCausalLM):
    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        layer = LayerOptions(
            attention=read.attention(
                fields,
                output_bias=fields.get("attention_out_bias", False),
            ),
            mlp=read.gated_mlp(fields),
            norm=read.norm(fields),
        )
        return DecoderOptions(layers=(layer,) * fields["num_hidden_layers"], norm=layer.norm)
