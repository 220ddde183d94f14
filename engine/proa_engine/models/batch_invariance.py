"""Check that a GPU can run a model batch-invariantly, and configure it so."""

from dataclasses import replace

from proa_engine.layers.cache_layers import LatentLayer
from proa_engine.layers.linear import Unquantized
from proa_engine.models.config import ModelConfig


def make_batch_invariant(config: ModelConfig, tensor_parallel_size: int) -> ModelConfig:
    """Return the batch-invariant configuration. Raises ValueError, naming the feature, if it is not supported with
    it."""
    if not isinstance(config.linear_method, Unquantized):
        raise ValueError("batch_invariant on a GPU is not supported with quantized weights")
    if any(layer.mlp.num_experts for layer in config.layers):
        raise ValueError("batch_invariant on a GPU is not supported with a mixture of experts")
    if any(layer.cache_kind is LatentLayer for layer in config.layers):  # `HeadLinear` is a batched product
        raise ValueError("batch_invariant on a GPU is not supported with latent attention")
    if tensor_parallel_size > 1:
        raise ValueError(
            f"batch_invariant on a GPU is not supported with tensor_parallel_size {tensor_parallel_size}, only with 1"
        )
    return replace(config, batch_invariant=True, linear_method=Unquantized(batch_invariant=True))
