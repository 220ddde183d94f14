"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with routed experts and one shared expert, scaled by a sigmoid, in most layers."""

from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.decoder_layer import LayerOptions
from proa_engine.models.qwen2 import qwen_windows
from proa_engine.models.qwen3_next import experts


class Qwen2MoeForCausalLM(DecoderForCausalLM):
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
