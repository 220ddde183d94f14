"""Qwen3 with a mixture of experts in place of most feed-forward layers (30B-A3B, 235B-A22B)."""

from proa_engine.layers.moe import Router, SparseMoE, load_experts
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Weights
from proa_engine.models.config import ModelConfig
from proa_engine.models.decoder import MLP, DecoderForCausalLM, make_gated_mlp
from proa_engine.models.qwen3 import attention_options


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    def __init__(self, config: ModelConfig, weights: Weights, parallel: ParallelContext) -> None:
        super().__init__(config, weights, parallel, lambda layer: attention_options(config, layer), _make_mlp)


def _make_mlp(weights: Weights, config: ModelConfig, parallel: ParallelContext, layer: int) -> MLP:
    moe = config.moe
    if moe is None or layer not in moe.layers:
        return make_gated_mlp(weights, config, parallel, layer)
    router = Router(weights / "gate", config.hidden_size, moe.num_experts, moe.routing)
    experts = load_experts(weights / "experts", config.hidden_size, moe.intermediate_size, moe.num_experts, parallel)
    return SparseMoE(router, experts, parallel)
