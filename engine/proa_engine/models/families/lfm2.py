"""LFM2 of Liquid AI: gated short convolutions in most layers, attention in the others."""

from collections.abc import Sequence
from typing import ClassVar

from proa_engine.kernels.experts.moe_route import Routing
from proa_engine.layers.attention import QkNorm
from proa_engine.layers.experts import SeparateExperts
from proa_engine.layers.mlp import MoEOptions, RouterOptions
from proa_engine.layers.norm import NormOptions
from proa_engine.layers.short_conv import KERNEL_SIZES, GatedShortConvOptions
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.decoder_layer import FeedForwardOptions, LayerOptions, MixerOptions

LAYER_TYPES = ("conv", "full_attention")


class Lfm2ForCausalLM(DecoderForCausalLM):
    """LFM2: a gated feed-forward layer behind each mixer."""

    defaults: ClassVar[read.Fields] = {
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
    }
    names: ClassVar[tuple[tuple[str, str], ...]] = (
        ("norm", "embedding_norm"),
        ("input_layernorm", "operator_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.q_norm", "self_attn.q_layernorm"),
        ("self_attn.k_norm", "self_attn.k_layernorm"),
        ("self_attn.o_proj", "self_attn.out_proj"),
        ("mlp", "feed_forward"),
        ("feed_forward.gate_proj", "feed_forward.w1"),
        ("feed_forward.up_proj", "feed_forward.w3"),
        ("feed_forward.down_proj", "feed_forward.w2"),
    )

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        mlp = read.gated_mlp(fields, inner_size=_inner_size(fields))
        return _decoder(fields, [mlp] * fields["num_hidden_layers"])


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """LFM2 with experts, which are chosen by corrected sigmoids, behind the mixers of all but the first layers."""

    names: ClassVar[tuple[tuple[str, str], ...]] = (
        *Lfm2ForCausalLM.names,
        ("gate.expert_bias", "expert_bias"),
    )

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        routing = Routing(
            fields["num_experts_per_tok"],
            normalize=fields.get("norm_topk_prob", True),
            scoring="sigmoid",
            scale=fields.get("routed_scaling_factor", 1.0),
        )
        has_correction = fields.get("use_expert_bias", True)
        experts = MoEOptions(
            num_experts=fields["num_experts"],
            expert_size=fields["moe_intermediate_size"],
            router=RouterOptions(routing=routing, correction="expert_bias" if has_correction else None),
            experts=SeparateExperts(gate="w1", up="w3", down="w2"),
        )
        num_dense, num_layers = fields.get("num_dense_layers", 2), fields["num_hidden_layers"]
        dense = read.gated_mlp(fields)
        return _decoder(fields, [dense if layer < num_dense else experts for layer in range(num_layers)])


def _inner_size(fields: read.Fields) -> int:
    size: int = fields.get("block_ff_dim") or fields["intermediate_size"]
    if not fields.get("block_auto_adjust_ff_dim", True):
        return size
    size, factor = int(2 * size / 3), fields.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return size
    multiple = fields.get("block_multiple_of", 256)
    return int(-(-int(factor * size) // multiple) * multiple)


def _decoder(fields: read.Fields, mlps: Sequence[FeedForwardOptions]) -> DecoderOptions:
    """`mlps`: one for each layer."""
    read.require(fields, "conv_L_cache", KERNEL_SIZES)
    norm = NormOptions(fields["norm_eps"])
    mixers: dict[str, MixerOptions] = {
        "full_attention": read.attention(fields, qk_norm=QkNorm(norm)),
        "conv": GatedShortConvOptions(
            channels=fields["hidden_size"],
            kernel_size=fields["conv_L_cache"],
            bias=fields.get("conv_bias", False),
        ),
    }
    layers = [
        LayerOptions(attention=mixers[kind], mlp=mlp, norm=norm)
        for kind, mlp in zip(_layer_types(fields), mlps, strict=True)
    ]
    return DecoderOptions(layers=tuple(layers), norm=norm)


def _layer_types(fields: read.Fields) -> Sequence[str]:
    """The type of each layer; older configurations have the numbers of those with attention."""
    numbers = range(fields["num_hidden_layers"])
    full = fields.get("full_attn_idxs")
    types = fields.get("layer_types") or [LAYER_TYPES[full is None or number in full] for number in numbers]
    read.check_layer_types(types, LAYER_TYPES)
    return types
