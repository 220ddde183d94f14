"""Which models a GPU can compute so that a token's bits do not depend on its batch, and the form that says so."""

from dataclasses import replace

from proa_engine.layers.linear import Unquantized
from proa_engine.models.config import ModelConfig


def make_batch_invariant(config: ModelConfig, tensor_parallel_size: int) -> ModelConfig:
    """Raises ValueError, naming what cannot be had with it: products and sums that are cut by the size of a batch."""
    if not isinstance(config.linear_method, Unquantized):
        raise ValueError("batch_invariant on a GPU is not supported with quantized weights")
    if config.moe is not None:
        raise ValueError("batch_invariant on a GPU is not supported with a mixture of experts")
    if tensor_parallel_size > 1:
        raise ValueError(
            f"batch_invariant on a GPU is not supported with tensor_parallel_size {tensor_parallel_size}, only with 1"
        )
    return replace(config, batch_invariant=True, linear_method=Unquantized(batch_invariant=True))
