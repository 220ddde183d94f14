"""Granite 3 and 4 of IBM, and MiniCPM: factors of the embeddings, the attention scores, the residuals and the
logits."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from proa_engine.kernels.experts.moe_route import Routing
from proa_engine.layers.experts import ExpertTensors
from proa_engine.layers.mamba2 import Mamba2Options
from proa_engine.layers.mlp import MoEOptions, RouterOptions, SharedExpertOptions
from proa_engine.layers.short_conv import KERNEL_SIZES
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.decoder_layer import FeedForwardOptions, LayerOptions, MixerOptions
from proa_engine.models.families.llama import equal_layers


class GraniteForCausalLM(DecoderForCausalLM):
    """Granite 3: Llama with the four factors."""

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        return _with_factors(fields, equal_layers(fields, **_factors_of_layers(fields)))


class MiniCPMForCausalLM(DecoderForCausalLM):
    """MiniCPM: Granite 3 with factors that follow from the numbers of layers and of hidden values (Hu et al. 2024)."""

    defaults: ClassVar[read.Fields] = {
        "dim_model_base": 1,
        "scale_depth": 1,
        "scale_emb": 1,
        "tie_word_embeddings": True,
    }

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        read.require(fields, "num_experts", (0,))
        read.require(fields, "sparse_config", ())
        factors = {
            "attention_multiplier": read.head_dim(fields) ** -0.5,
            "embedding_multiplier": fields["scale_emb"],
            "logits_scaling": fields["hidden_size"] / fields["dim_model_base"],
            "residual_multiplier": fields["scale_depth"] / fields["num_hidden_layers"] ** 0.5,
        }
        return GraniteForCausalLM.read_options({**fields, **factors})


class GraniteMoeHybridForCausalLM(DecoderForCausalLM):
    """Granite 4: Mamba2 in most layers or none, attention in the others, mostly without rotation; experts beside a
    feed-forward layer, or this alone."""

    defaults: ClassVar[read.Fields] = {"mamba_expand": 2, "shared_intermediate_size": 1024}
    names: ClassVar[tuple[tuple[str, str], ...]] = (
        ("mlp", "shared_mlp"),
        ("block_sparse_moe.shared_mlp", "shared_mlp"),
        ("shared_mlp.gate_up_proj", "shared_mlp.input_linear"),
        ("shared_mlp.down_proj", "shared_mlp.output_linear"),
        ("block_sparse_moe.router", "block_sparse_moe.router.layer"),
        ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
        ("block_sparse_moe.experts.down_proj", "block_sparse_moe.output_linear.weight"),
    )

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        norm, factors, num_layers = read.norm(fields), _factors_of_layers(fields), fields["num_hidden_layers"]
        rope = read.rope(fields)
        if fields.get("position_embedding_type") != "rope":
            rope = replace(rope, type="none")
        residual_scale, mlp = factors.pop("residual_scale"), _feed_forward(fields)
        types = read.mixer_types(fields.get("layer_types") or ["linear_attention"] * num_layers)
        read.check_layer_types(types, read.MIXER_TYPES)
        mixers: dict[str, MixerOptions] = {"full_attention": read.attention(fields, rope=rope, **factors)}
        if "linear_attention" in types:
            mixers["linear_attention"] = _mamba2(fields)
        layers = [
            LayerOptions(attention=mixers[kind], mlp=mlp, norm=norm, residual_scale=residual_scale) for kind in types
        ]
        return _with_factors(fields, DecoderOptions(layers=tuple(layers), norm=norm))


def _factors_of_layers(fields: read.Fields) -> dict[str, Any]:
    return {
        "scale": fields.get("attention_multiplier", 1.0),
        "residual_scale": fields.get("residual_multiplier", 1.0),
    }


def _with_factors(fields: read.Fields, options: DecoderOptions) -> DecoderOptions:
    return replace(
        options,
        embedding_scale=fields.get("embedding_multiplier", 1.0),
        scales_prompt_embeds=True,
        logits_scale=1 / fields.get("logits_scaling", 1.0),
    )


def _feed_forward(fields: Mapping[str, Any]) -> FeedForwardOptions:
    shared = read.gated_mlp(fields, inner_size=fields["shared_intermediate_size"], stored_merged=True)
    if not fields["num_local_experts"]:
        return shared
    read.require(fields, "hidden_act", ("silu",))
    return MoEOptions(
        num_experts=fields["num_local_experts"],
        expert_size=fields["intermediate_size"],
        router=RouterOptions(routing=Routing(fields["num_experts_per_tok"], normalize=True), name="router"),
        experts=ExpertTensors(),
        shared=SharedExpertOptions(mlp=shared, name="shared_mlp"),
        name="block_sparse_moe",
    )


def _mamba2(fields: read.Fields) -> Mamba2Options:
    read.require(fields, "hidden_act", ("silu",))
    read.require(fields, "mamba_d_conv", KERNEL_SIZES)
    num_heads, head_dim = fields["mamba_n_heads"], fields.get("mamba_d_head", "auto")
    if head_dim == "auto":
        head_dim = fields["mamba_expand"] * fields["hidden_size"] // num_heads
    return Mamba2Options(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=fields["mamba_n_groups"],
        state_size=fields["mamba_d_state"],
        kernel_size=fields.get("mamba_d_conv", 4),
        conv_bias=fields.get("mamba_conv_bias", True),
        bias=fields.get("mamba_proj_bias", False),
        norm=read.norm(fields),
        step_limit=read.step_limit(fields),
    )
