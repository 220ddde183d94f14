"""gpt-oss (20b, 120b): every other layer has a window, attention has sinks, and experts with biases and a clamped
activation are stored in one tensor each, as 4-bit floats (mxfp4) or unquantized."""

from typing import ClassVar

from proa_engine.kernels.experts.moe_route import Routing
from proa_engine.kernels.silu_and_mul import ClampedSwiGLU
from proa_engine.layers.experts import ExpertTensors
from proa_engine.layers.mlp import MoEOptions, RouterOptions
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.decoder_layer import LayerOptions


class GptOssForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[read.Fields] = {
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "torch_dtype": "bfloat16",
    }

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        read.require(fields, "hidden_act", ("silu",))
        norm, rope = read.norm(fields), read.rope(fields)
        activation = ClampedSwiGLU(fields["swiglu_alpha"], fields["swiglu_limit"])
        # The softmax over the chosen logits is the normalised softmax over all.
        routing = Routing(fields["num_experts_per_tok"], normalize=True)
        experts = MoEOptions(
            num_experts=fields["num_local_experts"],
            expert_size=fields["intermediate_size"],
            router=RouterOptions(routing=routing, name="router", bias=True),
            experts=ExpertTensors(activation=activation, interleaved=True, inputs_first=True, bias=True),
        )
        types = read.layer_types(fields, read.every(2, fields))
        layers = [
            LayerOptions(attention=read.attention(fields, rope=rope, window=window, sinks=True), mlp=experts, norm=norm)
            for window in read.windows(fields, types)
        ]
        return DecoderOptions(layers=tuple(layers), norm=norm)
