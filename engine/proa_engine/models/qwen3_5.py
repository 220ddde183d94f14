"""Qwen3.5 (dense and mixture of experts): the layers of Qwen3-Next.

Of checkpoints that also read images, only the text model is loaded. Their rotation has three positions a token, which
are equal for text, so it is the plain one.
"""

from typing import ClassVar

from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.qwen3_next import experts, hybrid_options


class Qwen3_5ForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[read.Fields] = {"partial_rotary_factor": 0.25, "full_attention_interval": 4}

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


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """Qwen3.5 with an image encoder, which is not loaded."""


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):
    """Qwen3.5 MoE with an image encoder, which is not loaded."""
