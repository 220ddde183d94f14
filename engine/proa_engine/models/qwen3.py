"""Qwen3 (dense): q and k are normalised by head; biases only if the config sets them."""

from proa_engine.layers.attention import AttentionOptions
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Weights
from proa_engine.models.config import ModelConfig
from proa_engine.models.decoder import DecoderForCausalLM


class Qwen3ForCausalLM(DecoderForCausalLM):
    def __init__(self, config: ModelConfig, weights: Weights, parallel: ParallelContext) -> None:
        super().__init__(config, weights, parallel, lambda layer: attention_options(config, layer))


def attention_options(config: ModelConfig, layer: int) -> AttentionOptions:
    return AttentionOptions(
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm_eps=config.rms_norm_eps,
        window=config.layer_windows[layer],
    )
