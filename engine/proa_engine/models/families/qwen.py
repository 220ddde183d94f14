"""Qwen2, MiMo and Qwen3, dense and mixtures of experts."""

from collections.abc import Sequence
from typing import Any

from proa_engine.kernels.experts.moe_route import Routing
from proa_engine.layers.attention import QkNorm
from proa_engine.layers.experts import PLAIN_EXPERTS, ExpertStorage, SeparateOrTogether
from proa_engine.layers.mlp import MoEOptions, RouterOptions, SharedExpertOptions
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.decoder_layer import FeedForwardOptions, LayerOptions


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Qwen2 and Qwen2.5: biases on q, k and v, none on the output; upper layers may have a sliding window."""

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        return _decoder(fields, dense_layers(fields), qkv_bias=True, output_bias=False)


class MiMoForCausalLM(Qwen2ForCausalLM):
    """MiMo-7B: Qwen2 with a layer for further tokens, which a drafter may be."""


class Qwen2MoeForCausalLM(DecoderForCausalLM):
    """Qwen1.5-MoE and Qwen2-MoE: Qwen2 with routed experts and one shared expert, scaled by a sigmoid, in most
    layers."""

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        experts = shared_expert_moe(fields, normalize=fields.get("norm_topk_prob", False))
        mlps = sparse_layers(fields, experts)
        return _decoder(fields, mlps, qkv_bias=fields.get("qkv_bias", True), output_bias=False)


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Qwen3 (dense): q and k are normalised by head; biases only if the config sets them."""

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        return _decoder(fields, dense_layers(fields), qk_norm=QkNorm(read.norm(fields)))


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Qwen3 with a mixture of experts in place of most feed-forward layers (30B-A3B, 235B-A22B)."""

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        return qwen3_moe_decoder(fields, PLAIN_EXPERTS)


def qwen3_moe_decoder(fields: read.Fields, storage: ExpertStorage) -> DecoderOptions:
    routing = Routing(fields["num_experts_per_tok"], normalize=fields.get("norm_topk_prob", False))
    experts = MoEOptions(
        # `num_experts` is the older name, `num_local_experts` that of transformers 5.
        num_experts=fields["num_experts"] if "num_experts" in fields else fields["num_local_experts"],
        expert_size=fields["moe_intermediate_size"],
        router=RouterOptions(routing=routing),
        experts=storage,
    )
    return _decoder(fields, sparse_layers(fields, experts), qk_norm=QkNorm(read.norm(fields)))


def dense_layers(fields: read.Fields) -> list[FeedForwardOptions]:
    """The feed-forward layer of each layer of a dense model."""
    return [read.gated_mlp(fields)] * fields["num_hidden_layers"]


def sparse_layers(fields: read.Fields, experts: MoEOptions) -> list[FeedForwardOptions]:
    """The feed-forward layer of each layer: `experts` in those that the fields do not exclude."""
    step, plain = fields.get("decoder_sparse_step", 1), fields.get("mlp_only_layers") or ()
    return [
        experts if number not in plain and (number + 1) % step == 0 else read.gated_mlp(fields)
        for number in range(fields["num_hidden_layers"])
    ]


def shared_expert_moe(fields: read.Fields, *, normalize: bool) -> MoEOptions:
    """Routed experts, and one shared expert that is scaled by a sigmoid."""
    read.require(fields, "hidden_act", ("silu",))
    shared = read.gated_mlp(fields, inner_size=fields["shared_expert_intermediate_size"])
    return MoEOptions(
        num_experts=fields["num_experts"],
        expert_size=fields["moe_intermediate_size"],
        router=RouterOptions(routing=Routing(fields["num_experts_per_tok"], normalize=normalize)),
        experts=SeparateOrTogether(),
        shared=SharedExpertOptions(mlp=shared, name="shared_expert", gate="shared_expert_gate"),
    )


def _decoder(fields: read.Fields, mlps: Sequence[FeedForwardOptions], **attention: Any) -> DecoderOptions:
    """`mlps`: the feed-forward layer of each layer. `attention`: options of `AttentionOptions`."""
    norm = read.norm(fields)
    layers = [
        LayerOptions(attention=read.attention(fields, window=window, **attention), mlp=mlp, norm=norm)
        for window, mlp in zip(_windows(fields), mlps, strict=True)
    ]
    return DecoderOptions(layers=tuple(layers), norm=norm)


def _windows(fields: read.Fields) -> tuple[int | None, ...]:
    """The window of each layer; `use_sliding_window` switches all off."""
    num_layers: int = fields["num_hidden_layers"]
    if not fields.get("use_sliding_window", False):
        return (None,) * num_layers
    first = fields.get("max_window_layers", 28)
    return read.windows(fields, read.layer_types(fields, [read.kind(layer >= first) for layer in range(num_layers)]))
