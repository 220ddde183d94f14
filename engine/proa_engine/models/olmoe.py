"""OLMoE: Llama with experts in every layer; q and k are normalised as a whole."""

from typing import ClassVar

from proa_engine.kernels.moe_route import Routing
from proa_engine.layers.attention import QkNorm
from proa_engine.layers.moe import MoEOptions, RouterOptions
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.decoder_layer import LayerOptions


class OlmoeForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[read.Fields] = {"rms_norm_eps": 1e-5}

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        read.require(fields, "hidden_act", ("silu",))
        read.require(fields, "clip_qkv", ())
        norm = read.norm(fields)
        routing = Routing(fields["num_experts_per_tok"], normalize=fields.get("norm_topk_prob", False))
        layer = LayerOptions(
            attention=read.attention(fields, qk_norm=QkNorm(norm, whole=True)),
            mlp=MoEOptions(
                num_experts=fields["num_experts"],
                expert_size=fields["intermediate_size"],
                router=RouterOptions(routing=routing),
            ),
            norm=norm,
        )
        return DecoderOptions(layers=(layer,) * fields["num_hidden_layers"], norm=norm)
