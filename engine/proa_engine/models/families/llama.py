"""Llama, and models that differ from it in a few options."""

from dataclasses import replace
from typing import Any, ClassVar

from proa_engine.kernels.experts.moe_route import Routing
from proa_engine.layers.experts import SeparateExperts
from proa_engine.layers.mlp import MoEOptions, RouterOptions
from proa_engine.layers.norm import LayerNormOptions, NormOptions
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM, ImageReadingDecoder
from proa_engine.models.decoder_layer import PRE_NORM, FeedForwardOptions, LayerOptions, NormNames
from proa_engine.models.families.pixtral_vision import read_pixtral_vision


def equal_layers(
    fields: read.Fields,
    *,
    mlp: FeedForwardOptions | None = None,
    norm: NormOptions | LayerNormOptions | None = None,
    norms: NormNames = PRE_NORM,
    residual_scale: float = 1.0,
    **attention: Any,
) -> DecoderOptions:
    """Llama's decoder, all of whose layers are equal. The arguments replace its options: those of `LayerOptions`, and
    `attention` those of `AttentionOptions`."""
    layer = LayerOptions(
        attention=read.attention(fields, **attention),
        mlp=mlp or read.gated_mlp(fields),
        norm=norm or read.norm(fields),
        norms=norms,
        residual_scale=residual_scale,
    )
    return DecoderOptions(layers=(layer,) * fields["num_hidden_layers"], norm=layer.norm)


class LlamaForCausalLM(DecoderForCausalLM):
    """Llama 2 and 3 (also Proa's built-in model): biases only if the config sets them (InternLM: by `bias`)."""

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        bias = fields.get("attention_bias", fields.get("bias", False))
        return equal_layers(fields, qkv_bias=bias, output_bias=bias)


class MistralForCausalLM(DecoderForCausalLM):
    """Mistral: Llama with a sliding window on every layer, if the config sets one."""

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        return equal_layers(fields, window=fields.get("sliding_window"))


class Ministral3ForCausalLM(MistralForCausalLM):
    """Ministral 3: Mistral whose queries grow with the logarithm of their position (a field of `rope_parameters`)."""

    defaults: ClassVar[read.Fields] = {"rms_norm_eps": 1e-5}


class Mistral3ForConditionalGeneration(ImageReadingDecoder):
    """Ministral 3, or Mistral Small 3, with an image encoder."""

    defaults: ClassVar[read.Fields] = {**Ministral3ForCausalLM.defaults, "image_token_index": 10}
    read_options = staticmethod(MistralForCausalLM.read_options)
    read_images = staticmethod(read_pixtral_vision)


class MixtralForCausalLM(DecoderForCausalLM):
    """Mixtral: Mistral with experts in every layer, weighted by the softmax over the chosen ones."""

    defaults: ClassVar[read.Fields] = {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        read.require(fields, "hidden_act", ("silu",))
        experts = MoEOptions(
            num_experts=fields["num_local_experts"],
            expert_size=fields["intermediate_size"],
            router=RouterOptions(routing=Routing(fields["num_experts_per_tok"], normalize=True)),
            experts=SeparateExperts(gate="w1", up="w3", down="w2"),
            name="block_sparse_moe",
        )
        return equal_layers(fields, mlp=experts, window=fields.get("sliding_window"))


class Phi3ForCausalLM(DecoderForCausalLM):
    """Phi-3 and Phi-4: Llama whose checkpoint has q, k and v in one matrix, gate and up in another; maybe a window."""

    defaults: ClassVar[read.Fields] = {"rms_norm_eps": 1e-5}

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        mlp, rope = read.gated_mlp(fields, stored_merged=True), read.rope(fields, partial=True)
        return equal_layers(fields, mlp=mlp, rope=rope, window=fields.get("sliding_window"), stored_merged=True)


class SeedOssForCausalLM(DecoderForCausalLM):
    """Seed-OSS: Llama whose attention has biases on the inputs and the output by two fields."""

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        return equal_layers(fields, output_bias=fields.get("attention_out_bias", False))


class SmolLM3ForCausalLM(DecoderForCausalLM):
    """SmolLM3: Llama whose every fourth layer does not encode positions, and may have a sliding window."""

    defaults: ClassVar[read.Fields] = {"tie_word_embeddings": True, "rope_theta": 2_000_000.0}

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        rope, norm = read.rope(fields), read.norm(fields)
        interval, num_layers = fields.get("no_rope_layer_interval", 4), fields["num_hidden_layers"]
        rotated = fields.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(num_layers)]
        has_windows = fields.get("use_sliding_window", False)
        types = read.layer_types(fields, [read.kind(has_windows and not each) for each in rotated])
        windows = read.windows(fields, types) if has_windows else (None,) * num_layers
        layers = [
            LayerOptions(
                attention=read.attention(
                    fields,
                    rope=rope if is_rotated else replace(rope, type="none"),
                    window=window,
                ),
                mlp=read.gated_mlp(fields),
                norm=norm,
            )
            for is_rotated, window in zip(rotated, windows, strict=True)
        ]
        return DecoderOptions(layers=tuple(layers), norm=norm)


class GlmForCausalLM(DecoderForCausalLM):
    """GLM-4 of 2024: half of each head is rotated, pairs of neighbours; gate and up are one matrix in the
    checkpoint."""

    defaults: ClassVar[read.Fields] = {"partial_rotary_factor": 0.5, "attention_bias": True}
    norms: ClassVar[NormNames] = PRE_NORM

    @classmethod
    def read_options(cls, fields: read.Fields) -> DecoderOptions:
        mlp, rope = read.gated_mlp(fields, stored_merged=True), read.rope(fields, interleaved=True, partial=True)
        return equal_layers(fields, mlp=mlp, norms=cls.norms, rope=rope, output_bias=False)


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4-0414: GLM-4 with norms before and after attention and the feed-forward layer."""

    norms: ClassVar[NormNames] = NormNames(
        before_attention="input_layernorm",
        after_attention="post_self_attn_layernorm",
        before_mlp="post_attention_layernorm",
        after_mlp="post_mlp_layernorm",
    )
