"""Supported architectures: the names that config.json gives them, and the modules that define their classes."""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proa_engine.layers.parallel import ParallelContext
    from proa_engine.layers.weights import Weights
    from proa_engine.models.base import CausalLM
    from proa_engine.models.config import ModelConfig

# The class has the architecture's name. Modules are imported on use, because they import ModelConfig, which checks
# architectures by this table.
MODULES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "SeedOssForCausalLM": "seed_oss",
}


def model_class(architecture: str) -> "Callable[[ModelConfig, Weights, ParallelContext], CausalLM]":
    """Return the class of `architecture`, a name in `MODULES`."""
    model: Callable[[ModelConfig, Weights, ParallelContext], CausalLM]
    model = getattr(import_module(f"proa_engine.models.{MODULES[architecture]}"), architecture)
    return model
