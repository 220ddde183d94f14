"""Nemotron-H and Nemotron 3 of NVIDIA: layers of one part, Mamba2, attention or feed-forward."""

from dataclasses import replace
from typing import ClassVar

from proa_engine.layers.experts import UngatedExperts
from proa_engine.layers.mamba2 import Mamba2Options
from proa_engine.layers.mlp import MoEOptions, SharedExpertOptions, UngatedMLPOptions
from proa_engine.layers.norm import NormOptions
from proa_engine.layers.short_conv import KERNEL_SIZES
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.decoder_layer import LayerDeclaration
from proa_engine.models.families.deepseek import sigmoid_router
from proa_engine.models.single_part_layers import FeedForwardLayerOptions, MixerLayerOptions

LAYER_TYPES = (*read.MIXER_TYPES, "mlp", "moe")
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}  # of `hybrid_override_pattern`


class NemotronHForCausalLM(DecoderForCausalLM):
    """Nemotron-H and Nemotron 3: Mamba2 in most layers with a mixer, attention without rotation in the others;
    feed-forward layers without a gate, or experts without one, which may read and write latent values."""

    defaults: ClassVar[read.Fields] = {"layer_norm_epsilon": 1e-5, "conv_kernel": 4, "n_groups": 8}
    names: ClassVar[tuple[tuple[str, str], ...]] = (
        ("embed_tokens", "embeddings"),
        ("backbone.norm", "backbone.norm_f"),
        ("mamba", "mixer"),
        ("self_attn", "mixer"),
        ("mlp", "mixer"),
        ("mixer.experts.fc1_latent_proj", "mixer.fc1_latent_proj"),
        ("mixer.experts.fc2_latent_proj", "mixer.fc2_latent_proj"),
    )

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        read.require(fields, "mlp_hidden_act", ("relu2",))
        read.require(fields, "mlp_bias", (False,))
        read.require(fields, "residual_in_fp32", (False,))
        norm, types = NormOptions(fields["layer_norm_epsilon"]), _layer_types(fields)
        layers: dict[str, LayerDeclaration] = {}
        if "linear_attention" in types:
            layers["linear_attention"] = MixerLayerOptions(mixer=_mamba2(fields, norm), norm=norm)
        if "full_attention" in types:
            rope = replace(read.rope(fields), type="none")
            attention = read.attention(fields, rope=rope, qkv_bias=False, output_bias=False)
            layers["full_attention"] = MixerLayerOptions(mixer=attention, norm=norm)
        if "mlp" in types:
            mlp = UngatedMLPOptions(inner_size=fields["intermediate_size"])
            layers["mlp"] = FeedForwardLayerOptions(mlp=mlp, norm=norm)
        if "moe" in types:
            layers["moe"] = FeedForwardLayerOptions(mlp=_experts(fields), norm=norm)
        return DecoderOptions(layers=tuple(layers[kind] for kind in types), norm=norm)


def _layer_types(fields: read.Fields) -> list[str]:
    given = fields.get("layers_block_type") or fields.get("layer_types")
    if not given:
        given = [_LETTERS.get(letter, letter) for letter in fields["hybrid_override_pattern"]]
    types = read.mixer_types(given)
    read.check_layer_types(types, LAYER_TYPES)
    return types


def _mamba2(fields: read.Fields, norm: NormOptions) -> Mamba2Options:
    read.require(fields, "mamba_hidden_act", ("silu",))
    read.require(fields, "conv_kernel", KERNEL_SIZES)
    return Mamba2Options(
        num_heads=fields["mamba_num_heads"],
        head_dim=fields["mamba_head_dim"],
        num_groups=fields["n_groups"],
        state_size=fields["ssm_state_size"],
        kernel_size=fields["conv_kernel"],
        conv_bias=fields.get("use_conv_bias", True),
        bias=fields.get("use_bias", False),
        norm=norm,
        step_limit=read.step_limit(fields),
    )


def _experts(fields: read.Fields) -> MoEOptions:
    return MoEOptions(
        num_experts=fields["n_routed_experts"],
        expert_size=fields["moe_intermediate_size"],
        router=sigmoid_router(fields),
        experts=UngatedExperts(latent_size=fields.get("moe_latent_size")),
        shared=SharedExpertOptions(mlp=UngatedMLPOptions(inner_size=fields["moe_shared_expert_intermediate_size"])),
    )
