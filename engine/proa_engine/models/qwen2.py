"""Qwen2 and Qwen2.5: biases on q, k and v, none on the output; upper layers may have a sliding window."""

from proa_engine.layers.attention import AttentionOptions
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Weights
from proa_engine.models.config import ModelConfig
from proa_engine.models.decoder import DecoderForCausalLM


class Qwen2ForCausalLM(DecoderForCausalLM):
    def __init__(self, config: ModelConfig, weights: Weights, parallel: ParallelContext) -> None:
        def options(layer: int) -> AttentionOptions:
            return AttentionOptions(qkv_bias=True, window=config.layer_windows[layer])

        super().__init__(config, weights, parallel, options)
