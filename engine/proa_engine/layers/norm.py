"""RMSNorm, alone or after a residual add."""

import torch

from proa_engine.kernels.rms_norm import add_rms_norm, rms_norm
from proa_engine.layers.weights import Weights


class RMSNorm:
    def __init__(self, weights: Weights, size: int, eps: float) -> None:
        self.weight = weights.take("weight", (size,))
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size], normalised over the last dimension."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (norm(x + residual), x + residual); may overwrite both inputs."""
        return add_rms_norm(x, residual, self.weight, self.eps)
