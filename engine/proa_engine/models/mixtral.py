"""Mixtral: Mistral with experts in every layer, weighted by the softmax over the chosen ones."""

from typing import ClassVar

from proa_engine.kernels.moe_route import Routing
from proa_engine.layers.experts import SeparateExperts
from proa_engine.layers.moe import MoEOptions, RouterOptions
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.decoder_layer import LayerOptions


class MixtralForCausalLM(DecoderForCausalLM):
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
        layer = LayerOptions(
            attention=read.attention(fields, window=fields.get("sliding_window")), mlp=experts, norm=read.norm(fields)
        )
        return DecoderOptions(layers=(layer,) * fields["num_hidden_layers"], norm=layer.norm)
