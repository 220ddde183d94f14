"""From an architecture's name in config.json to the class that runs it."""

from collections.abc import Callable

from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Weights
from proa_engine.models.base import CausalLM
from proa_engine.models.config import ModelConfig
from proa_engine.models.llama import LlamaForCausalLM
from proa_engine.models.mistral import MistralForCausalLM
from proa_engine.models.qwen2 import Qwen2ForCausalLM
from proa_engine.models.qwen3 import Qwen3ForCausalLM
from proa_engine.models.qwen3_moe import Qwen3MoeForCausalLM


def model_class(architecture: str) -> Callable[[ModelConfig, Weights, ParallelContext], CausalLM]:
    """`architecture` is one that `ModelConfig` has let through."""
    return {
        "LlamaForCausalLM": LlamaForCausalLM,
        "MistralForCausalLM": MistralForCausalLM,
        "Qwen2ForCausalLM": Qwen2ForCausalLM,
        "Qwen3ForCausalLM": Qwen3ForCausalLM,
        "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
    }[architecture]
