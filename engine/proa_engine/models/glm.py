"""GLM-4 of 2024: half of each head is rotated, pairs of neighbours; gate and up are one matrix in the checkpoint."""

from typing import ClassVar

from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.decoder_layer import PRE_NORM, LayerOptions, NormNames


class GlmForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[read.Fields] = {"partial_rotary_factor": 0.5, "attention_bias": True}
    norms: ClassVar[NormNames] = PRE_NORM

    @classmethod
    def read_options(cls, fields: read.Fields) -> DecoderOptions:
        layer = LayerOptions(
            attention=read.attention(fields, rope=read.rope(fields, interleaved=True, partial=True), output_bias=False),
            mlp=read.gated_mlp(fields, stored_merged=True),
            norm=read.norm(fields),
            norms=cls.norms,
        )
        return DecoderOptions(layers=(layer,) * fields["num_hidden_layers"], norm=layer.norm)
