"""DeepSeek, and models of other makers with its routed and shared experts, most of them with its latent attention."""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from proa_engine.kernels.experts.moe_route import Routing
from proa_engine.layers.attention import QkNorm
from proa_engine.layers.latent_attention import LatentAttentionOptions
from proa_engine.layers.mlp import MoEOptions, RouterOptions, SharedExpertOptions
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.decoder_layer import LayerOptions, MixerOptions


class DeepseekV2ForCausalLM(DecoderForCausalLM):
    """DeepSeek-V2 and V2-Lite: latent attention, and experts chosen by a softmax within the best groups."""

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        read.require(fields, "topk_method", ("greedy", "group_limited_greedy"))
        by_group = fields.get("topk_method") == "group_limited_greedy"
        routing = Routing(
            fields["num_experts_per_tok"],
            normalize=False,  # as in the model's own code, whatever norm_topk_prob is
            num_groups=fields["n_group"] if by_group else 1,
            num_chosen_groups=fields["topk_group"] if by_group else 1,
            group_best=1,
            scale=fields.get("routed_scaling_factor", 1.0),
        )
        num_dense = fields.get("first_k_dense_replace", 0)
        are_sparse = [layer >= num_dense for layer in range(fields["num_hidden_layers"])]
        return _decoder(fields, latent_attention(fields), RouterOptions(routing=routing), are_sparse)


class DeepseekV3ForCausalLM(DecoderForCausalLM):
    """DeepSeek-V3 and R1: latent attention; experts chosen by corrected sigmoids within the best groups."""

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        num_dense = fields.get("first_k_dense_replace", 3)
        are_sparse = [layer >= num_dense for layer in range(fields["num_hidden_layers"])]
        return _decoder(fields, latent_attention(fields), sigmoid_router(fields), are_sparse)


class Glm4MoeForCausalLM(DecoderForCausalLM):
    """GLM-4.5 to 4.7: experts chosen by corrected sigmoid scores, shared experts, and a rotation of half of each
    head."""

    defaults: ClassVar[read.Fields] = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5}

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        qk_norm = QkNorm(read.norm(fields)) if fields.get("use_qk_norm", False) else None
        rope = read.rope(fields, partial=True)
        attention = read.attention(fields, rope=rope, output_bias=False, qk_norm=qk_norm)
        are_sparse = [number >= fields["first_k_dense_replace"] for number in range(fields["num_hidden_layers"])]
        return _decoder(fields, attention, sigmoid_router(fields), are_sparse)


class Glm4MoeLiteForCausalLM(DecoderForCausalLM):
    """GLM-4.7-Flash: DeepSeek-V3's layer in a size for one GPU."""

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        num_layers, num_dense = fields["num_hidden_layers"], fields.get("first_k_dense_replace", 1)
        types = fields.get("mlp_layer_types") or ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)
        are_sparse = [each == "sparse" for each in types]
        return _decoder(fields, latent_attention(fields), sigmoid_router(fields), are_sparse)


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


def sigmoid_router(fields: read.Fields) -> RouterOptions:
    """DeepSeek-V3's router: the best groups by their two best experts, corrected sigmoids as weights."""
    routing = Routing(
        fields["num_experts_per_tok"],
        normalize=fields.get("norm_topk_prob", True),
        scoring="sigmoid",
        num_groups=fields.get("n_group") or 1,
        num_chosen_groups=fields.get("topk_group") or 1,
        scale=fields.get("routed_scaling_factor", 1.0),
    )
    return RouterOptions(routing=routing, correction="e_score_correction_bias")


def _decoder(
    fields: read.Fields, attention: MixerOptions, router: RouterOptions, are_sparse: Sequence[bool]
) -> DecoderOptions:
    """`are_sparse`: whether each layer has experts, which `router` chooses."""
    norm = read.norm(fields)
    shared = read.gated_mlp(fields, inner_size=fields["moe_intermediate_size"] * fields["n_shared_experts"])
    experts = MoEOptions(
        num_experts=fields["n_routed_experts"],
        expert_size=fields["moe_intermediate_size"],
        router=router,
        shared=SharedExpertOptions(mlp=shared),
    )
    layers = [
        LayerOptions(attention=attention, mlp=experts if is_sparse else read.gated_mlp(fields), norm=norm)
        for is_sparse in are_sparse
    ]
    return DecoderOptions(layers=tuple(layers), norm=norm)
