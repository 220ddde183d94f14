"""Read the layers of models with latent attention: those of DeepSeek, and those that follow them."""

import math
from collections.abc import Mapping, Sequence

from proa_engine.kernels.moe_route import Routing
from proa_engine.layers.latent_attention import LatentAttentionOptions
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.shared_experts import decoder_with_experts


def latent_decoder(
    fields: read.Fields, routing: Routing, are_sparse: Sequence[bool], correction: str | None = None
) -> DecoderOptions:
    """The arguments are those of `decoder_with_experts`."""
    return decoder_with_experts(fields, latent_attention(fields), routing, are_sparse, correction)


def latent_attention(fields: read.Fields) -> LatentAttentionOptions:
    read.require(fields, "attention_bias", (False,))
    nope_dim, rope_dim = fields["qk_nope_head_dim"], fields["qk_rope_head_dim"]
    return LatentAttentionOptions(
        num_heads=fields["num_attention_heads"],
        query_rank=fields.get("q_lora_rank"),
        rank=fields["kv_lora_rank"],
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=fields["v_head_dim"],
        rope=read.rope({**fields, "head_dim": rope_dim}),
        interleaved=fields.get("rope_interleave", True),
        scale=(nope_dim + rope_dim) ** -0.5 * _score_scale(fields),
        norm=read.norm(fields),
    )


def _score_scale(fields: read.Fields) -> float:
    """YaRN's factor of the scores, for queries and keys each, where `mscale_all_dim` asks for it."""
    given: Mapping[str, float] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    mscale, factor = given.get("mscale_all_dim") or 0.0, given.get("factor") or 1.0
    return (0.1 * mscale * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0
