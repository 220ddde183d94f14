"""Qwen3-Next and Qwen3.5: gated delta nets in most layers, attention with an output gate in the others."""

from collections.abc import Sequence
from typing import ClassVar

from proa_engine.layers.attention import QkNorm
from proa_engine.layers.gated_delta_net import KERNEL_SIZE, GatedDeltaNetOptions
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM, ImageReadingDecoder
from proa_engine.models.decoder_layer import FeedForwardOptions, LayerOptions, MixerOptions
from proa_engine.models.families.qwen import dense_layers, shared_expert_moe, sparse_layers
from proa_engine.models.families.qwen_vision import QWEN3, QwenVisionOptions, read_qwen_vision
from proa_engine.models.image_files import ImageFiles


class Qwen3NextForCausalLM(DecoderForCausalLM):
    """Qwen3-Next (80B-A3B): gated delta nets in most layers, attention with an output gate in the others, and
    experts."""

    defaults: ClassVar[read.Fields] = {"partial_rotary_factor": 0.25, "full_attention_interval": 4}

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        experts = shared_expert_moe(fields, normalize=fields.get("norm_topk_prob", True))
        return hybrid_options(fields, sparse_layers(fields, experts), by_key_head=True)


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
        read.MIXER_TYPES[(number + 1) % interval == 0] for number in range(fields["num_hidden_layers"])
    ]
    read.check_layer_types(types, read.MIXER_TYPES)
    return tuple(types)


class Qwen3_5ForCausalLM(DecoderForCausalLM):
    """Qwen3.5 (dense and mixture of experts): the layers of Qwen3-Next.

    Checkpoints that also read images have the image encoder of Qwen3-VL, without DeepStack.
    """

    defaults: ClassVar[read.Fields] = {
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "mrope_section": (11, 11, 10),
        "image_token_id": 248_056,
    }

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        read.require(fields, "attn_output_gate", (True,))
        return hybrid_options(fields, dense_layers(fields), by_key_head=False)


class Qwen3_5MoeForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[read.Fields] = Qwen3_5ForCausalLM.defaults

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        read.require(fields, "attn_output_gate", (True,))
        mlps = [shared_expert_moe(fields, normalize=True)] * fields["num_hidden_layers"]
        return hybrid_options(fields, mlps, by_key_head=False)


class Qwen3_5ForConditionalGeneration(ImageReadingDecoder):
    defaults: ClassVar[read.Fields] = Qwen3_5ForCausalLM.defaults
    read_options = staticmethod(Qwen3_5ForCausalLM.read_options)

    @staticmethod
    def read_images(fields: read.Fields, files: ImageFiles) -> QwenVisionOptions:
        return read_qwen_vision(fields, files, QWEN3)


class Qwen3_5MoeForConditionalGeneration(ImageReadingDecoder):
    defaults: ClassVar[read.Fields] = Qwen3_5ForCausalLM.defaults
    read_options = staticmethod(Qwen3_5MoeForCausalLM.read_options)
    read_images = staticmethod(Qwen3_5ForConditionalGeneration.read_images)
