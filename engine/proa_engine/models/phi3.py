"""Phi-3 and Phi-4: Llama whose checkpoint has q, k and v in one matrix, gate and up in another; maybe a window."""

from typing import ClassVar

from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.decoder_layer import LayerOptions


class Phi3ForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[read.Fields] = {"rms_norm_eps": 1e-5}

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        layer = LayerOptions(
            attention=read.attention(
                fields,
                rope=read.rope(fields, partial=True),
                window=fields.get("sliding_window"),
                stored_merged=True,
            ),
            mlp=read.gated_mlp(fields, stored_merged=True),
            norm=read.norm(fields),
        )
        return DecoderOptions(layers=(layer,) * fields["num_hidden_layers"], norm=layer.norm)
