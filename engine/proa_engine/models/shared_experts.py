"""Read layers with routed and shared experts: those of DeepSeek, and of models that follow it."""

from collections.abc import Sequence

from proa_engine.kernels.moe_route import Routing
from proa_engine.layers.moe import MoEOptions, RouterOptions, SharedExpertOptions
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder_layer import LayerOptions, MixerOptions


def decoder_with_experts(
    fields: read.Fields,
    attention: MixerOptions,
    routing: Routing,
    are_sparse: Sequence[bool],
    correction: str | None = None,
) -> DecoderOptions:
    """`are_sparse`: whether each layer has experts, which `routing` and the tensor `correction` choose."""
    norm = read.norm(fields)
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
