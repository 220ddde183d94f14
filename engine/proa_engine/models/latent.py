"""Read the layers of models with latent attention: those of DeepSeek, and those that follow them."""

import math
from collections.abc import Mapping, Sequence

from proa_engine.kernels.moe_route import Routing
from proa_engine.layers.latent_attention import LatentAttentionOptions
from proa_engine.layers.moe import MoEOptions, RouterOptions, SharedExpertOptions
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder_layer import LayerOptions


def latent_decoder(
    fields: read.Fields, routing: Routing, are_sparse: Sequence[bool], correction: str | None = None
) -> DecoderOptions:
    """`are_sparse`: whether each layer has experts, which `routing` and the tensor `correction` choose."""
    norm, attention = read.norm(fields), latent_attention(fields)
    shared = read.gated_mlp(fields, inner_size=fields["moe_intermediate_size"] * fields["n_shared_experts"])
    experts = MoEOptions(
        num_experts=fields["n_routed_experts"],
        expert_size=fields["moe_intermediate_size"],
        router=RouterOptions(routing=routing, correction=correction),
        shared=SharedExpertOptions(mlp=shared),
    )
    layers = [
        LayerOptions(attention=attention, mlp=experts if is_sparse else read.gated_mlp(fields), norm=norm)
        for is_sparse in are_sparse
    ]
    return DecoderOptions(layers=tuple(layers), norm=norm)


def sigmoid_routing(fields: read.Fields) -> Routing:
    """DeepSeek-V3's router: the best groups by their two best experts, sigmoids as weights."""
    return Routing(
        fields["num_experts_per_tok"],
        normalize=fields.get("norm_topk_prob", True),
        scoring="sigmoid",
        num_groups=fields.get("n_group") or 1,
        num_chosen_groups=fields.get("topk_group") or 1,
        scale=fields.get("routed_scaling_factor", 1.0),
    )


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
        rope=read.rope({**fields, "head_dim": rope_dim, "partial_rotary_factor": 1.0}),
        interleaved=fields.get("rope_interleave", True),
        scale=(nope_dim + rope_dim) ** -0.5 * _score_scale(fields),
        norm=read.norm(fields),
    )


def _score_scale(fields: read.Fields) -> float:
    """YaRN's factor of the scores, for queries and keys each, where `mscale_all_dim` asks for it."""
    given: Mapping[str, float] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    mscale, factor = given.get("mscale_all_dim") or 0.0, given.get("factor") or 1.0
    return (0.1 * mscale * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0
