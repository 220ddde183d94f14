"""Mistral: Llama with a sliding window on every layer, if the config sets one."""

from proa_engine.layers.attention import AttentionOptions
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Weights
from proa_engine.models.config import ModelConfig
from proa_engine.models.decoder import DecoderForCausalLM


class MistralForCausalLM(DecoderForCausalLM):
    def __init__(self, config: ModelConfig, weights: Weights, parallel: ParallelContext) -> None:
        super().__init__(config, weights, parallel, lambda layer: AttentionOptions(window=config.layer_windows[layer]))
