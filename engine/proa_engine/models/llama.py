"""Llama 2 and 3 (also Proa's built-in model): biases only if the config sets them."""

from proa_engine.layers.attention import AttentionOptions
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Weights
from proa_engine.models.config import ModelConfig
from proa_engine.models.decoder import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    def __init__(self, config: ModelConfig, weights: Weights, parallel: ParallelContext) -> None:
        options = AttentionOptions(qkv_bias=config.attention_bias, output_bias=config.attention_bias)
        super().__init__(config, weights, parallel, lambda layer: options)
