"""Qwen2 and Qwen3, dense and mixtures of experts."""

from collections.abc import Sequence

from proa_engine.kernels.moe_route import Routing
from proa_engine.layers.attention import AttentionOptions, QkNorm
from proa_engine.layers.experts import PLAIN_EXPERTS, ExpertStorage, SeparateOrTogether
from proa_engine.layers.moe import MoEOptions, RouterOptions, SharedExpertOptions
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.decoder_layer import LayerOptions


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Qwen2 and Qwen2.5: biases on q, k and v, none on the output; upper layers may have a sliding window."""

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        norm = read.norm(fields)
        layers = [
            LayerOptions(
                attention=read.attention(fields, qkv_bias=True, output_bias=False, window=window),
                mlp=read.gated_mlp(fields),
                norm=norm,
            )
            for window in qwen_windows(fields)
        ]
        return DecoderOptions(layers=tuple(layers), norm=norm)


def qwen_windows(fields: read.Fields) -> tuple[int | None, ...]:
    """The window of each layer; `use_sliding_window` switches all off."""
    num_layers: int = fields["num_hidden_layers"]
    if not fields.get("use_sliding_window", False):
        return (None,) * num_layers
    first = fields.get("max_window_layers", 28)
    return read.windows(fields, read.layer_types(fields, [read.kind(layer >= first) for layer in range(num_layers)]))


class Qwen2MoeForCausalLM(DecoderForCausalLM):
    """Qwen1.5-MoE and Qwen2-MoE: Qwen2 with routed experts and one shared expert, scaled by a sigmoid, in most
    layers."""

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        norm, bias = read.norm(fields), fields.get("qkv_bias", True)
        moe = experts(fields, normalize=fields.get("norm_topk_prob", False))
        step, plain = fields.get("decoder_sparse_step", 1), fields.get("mlp_only_layers") or ()
        layers = [
            LayerOptions(
                attention=read.attention(fields, qkv_bias=bias, output_bias=False, window=window),
                mlp=moe if number not in plain and (number + 1) % step == 0 else read.gated_mlp(fields),
                norm=norm,
            )
            for number, window in enumerate(qwen_windows(fields))
        ]
        return DecoderOptions(layers=tuple(layers), norm=norm)


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Qwen3 (dense): q and k are normalised by head; biases only if the config sets them."""

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        norm = read.norm(fields)
        layers = [
            LayerOptions(attention=attention, mlp=read.gated_mlp(fields), norm=norm)
            for attention in attention_options(fields)
        ]
        return DecoderOptions(layers=tuple(layers), norm=norm)


def attention_options(fields: read.Fields) -> Sequence[AttentionOptions]:
    """Of each layer."""
    qk_norm = QkNorm(read.norm(fields))
    return [read.attention(fields, qk_norm=qk_norm, window=window) for window in qwen_windows(fields)]


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Qwen3 with a mixture of experts in place of most feed-forward layers (30B-A3B, 235B-A22B)."""

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        return moe_options(fields, PLAIN_EXPERTS)


def moe_options(fields: read.Fields, storage: ExpertStorage) -> DecoderOptions:
    norm = read.norm(fields)
    experts = MoEOptions(
        # `num_experts` is the older name, `num_local_experts` that of transformers 5.
        num_experts=fields["num_experts"] if "num_experts" in fields else fields["num_local_experts"],
        expert_size=fields["moe_intermediate_size"],
        router=RouterOptions(
            routing=Routing(fields["num_experts_per_tok"], normalize=fields.get("norm_topk_prob", False))
        ),
        experts=storage,
    )
    step, plain = fields.get("decoder_sparse_step", 1), fields.get("mlp_only_layers") or ()
    layers = [
        LayerOptions(
            attention=attention,
            mlp=experts if number not in plain and (number + 1) % step == 0 else read.gated_mlp(fields),
            norm=norm,
        )
        for number, attention in enumerate(attention_options(fields))
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
