"""Qwen3 with a mixture of experts in place of most feed-forward layers (30B-A3B, 235B-A22B)."""

from proa_engine.kernels.moe_route import Routing
from proa_engine.layers.experts import PLAIN_EXPERTS, ExpertStorage
from proa_engine.layers.moe import MoEOptions, RouterOptions
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.decoder_layer import LayerOptions
from proa_engine.models.qwen3 import attention_options


class Qwen3MoeForCausalLM(DecoderForCausalLM):
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
