"""Qwen3-Next (80B-A3B): gated delta nets in most layers, attention with an output gate in the others, and experts."""

from collections.abc import Sequence
from typing import ClassVar

from proa_engine.kernels.moe_route import Routing
from proa_engine.layers.attention import QkNorm
from proa_engine.layers.experts import SeparateOrTogether
from proa_engine.layers.gated_delta_net import KERNEL_SIZE, GatedDeltaNetOptions
from proa_engine.layers.moe import MoEOptions, RouterOptions, SharedExpertOptions
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.decoder_layer import FeedForwardOptions, LayerOptions, MixerOptions

LAYER_TYPES = ("linear_attention", "full_attention")


class Qwen3NextForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[read.Fields] = {"partial_rotary_factor": 0.25, "full_attention_interval": 4}

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        step, plain = fields.get("decoder_sparse_step", 1), fields.get("mlp_only_layers") or ()
        moe = experts(fields, normalize=fields.get("norm_topk_prob", True))
        mlps = [
            moe if number not in plain and (number + 1) % step == 0 else read.gated_mlp(fields)
            for number in range(fields["num_hidden_layers"])
        ]
        return hybrid_options(fields, mlps, by_key_head=True)


def hybrid_options(fields: read.Fields, mlps: Sequence[FeedForwardOptions], *, by_key_head: bool) -> DecoderOptions:
    """`mlps`: one for each layer. `by_key_head` as in `GatedDeltaNetOptions`."""
    norm = read.norm(fields, offset=1.0)
    mixers: dict[str, MixerOptions] = {
        "full_attention": read.attention(
            fields, rope=read.rope(fields, partial=True), qk_norm=QkNorm(norm), output_gate=True
        ),
        "linear_attention": _gated_delta_net(fields, by_key_head=by_key_head),
    }
    layers = [
        LayerOptions(attention=mixers[kind], mlp=mlp, norm=norm)
        for kind, mlp in zip(_layer_types(fields), mlps, strict=True)
    ]
    return DecoderOptions(layers=tuple(layers), norm=norm)


def experts(fields: read.Fields, *, normalize: bool) -> MoEOptions:
    read.require(fields, "hidden_act", ("silu",))
    shared = read.gated_mlp(fields, inner_size=fields["shared_expert_intermediate_size"])
    return MoEOptions(
        num_experts=fields["num_experts"],
        expert_size=fields["moe_intermediate_size"],
        router=RouterOptions(routing=Routing(fields["num_experts_per_tok"], normalize=normalize)),
        experts=SeparateOrTogether(),
        shared=SharedExpertOptions(mlp=shared, name="shared_expert", gate="shared_expert_gate"),
    )


def _gated_delta_net(fields: read.Fields, *, by_key_head: bool) -> GatedDeltaNetOptions:
    read.require(fields, "linear_conv_kernel_dim", (KERNEL_SIZE,))
    num_key_heads, num_value_heads = fields["linear_num_key_heads"], fields["linear_num_value_heads"]
    if num_value_heads % num_key_heads:
        raise ValueError(f"linear_num_value_heads {num_value_heads} is not a multiple of {num_key_heads} key heads")
    return GatedDeltaNetOptions(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=fields["linear_key_head_dim"],
        value_dim=fields["linear_value_head_dim"],
        norm_eps=read.norm(fields).eps,
        by_key_head=by_key_head,
    )


def _layer_types(fields: read.Fields) -> tuple[str, ...]:
    interval = fields["full_attention_interval"]
    types = fields.get("layer_types") or [
        LAYER_TYPES[(number + 1) % interval == 0] for number in range(fields["num_hidden_layers"])
    ]
    for kind in types:
        if kind not in LAYER_TYPES:
            raise ValueError(f"layer type {kind} is not supported; supported: {', '.join(LAYER_TYPES)}")
    return tuple(types)
