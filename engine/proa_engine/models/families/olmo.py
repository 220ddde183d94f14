"""OLMo: q and k are normalised as a whole; from OLMo 2 on, norms follow attention and the feed-forward layer."""

from typing import ClassVar

from proa_engine.kernels.experts.moe_route import Routing
from proa_engine.layers.attention import QkNorm
from proa_engine.layers.mlp import MoEOptions, RouterOptions
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.decoder_layer import LayerOptions, NormNames
from proa_engine.models.families.llama import equal_layers

POST_NORM = NormNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)


class Olmo2ForCausalLM(DecoderForCausalLM):
    """OLMo 2: norms after attention and the feed-forward layer instead of before; q and k are normalised as a whole."""

    defaults: ClassVar[read.Fields] = {"rms_norm_eps": 1e-5}

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        return equal_layers(fields, norms=POST_NORM, qk_norm=QkNorm(read.norm(fields), whole=True))


class Olmo3ForCausalLM(DecoderForCausalLM):
    """OLMo 3: OLMo 2 with a sliding window on three of four layers, whose rotation is not scaled."""

    defaults: ClassVar[read.Fields] = {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096}

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        types = read.layer_types(fields, read.every(4, fields))
        ropes = read.ropes(fields, sliding_theta=fields["rope_theta"])
        norm, mlp = read.norm(fields), read.gated_mlp(fields)
        qk_norm = QkNorm(norm, whole=True)
        layers = [
            LayerOptions(
                attention=read.attention(fields, rope=ropes[kind], window=window, qk_norm=qk_norm),
                mlp=mlp,
                norm=norm,
                norms=POST_NORM,
            )
            for kind, window in zip(types, read.windows(fields, types), strict=True)
        ]
        return DecoderOptions(layers=tuple(layers), norm=norm)


class OlmoeForCausalLM(DecoderForCausalLM):
    """OLMoE: Llama with experts in every layer; q and k are normalised as a whole."""

    defaults: ClassVar[read.Fields] = {"rms_norm_eps": 1e-5}

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        read.require(fields, "hidden_act", ("silu",))
        read.require(fields, "clip_qkv", ())
        routing = Routing(fields["num_experts_per_tok"], normalize=fields.get("norm_topk_prob", False))
        experts = MoEOptions(
            num_experts=fields["num_experts"],
            expert_size=fields["intermediate_size"],
            router=RouterOptions(routing=routing),
        )
        return equal_layers(fields, mlp=experts, qk_norm=QkNorm(read.norm(fields), whole=True))
