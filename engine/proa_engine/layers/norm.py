"""RMSNorm, alone or after a residual add; quantized where the next product wants it so."""

import torch

from proa_engine.kernels.fp8 import Activation, Fp8Form
from proa_engine.kernels.fp8_rms_norm import add_rms_norm_fp8, rms_norm_fp8
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

    def into(self, form: Fp8Form | None, x: torch.Tensor) -> Activation:
        """x [T, size] -> norm(x), in the form that the next product wants."""
        return self(x) if form is None else rms_norm_fp8(x, self.weight, self.eps, form)

    def add_into(
        self, form: Fp8Form | None, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[Activation, torch.Tensor]:
        """As `add`, in the form that the next product wants."""
        if form is None:
            return self.add(x, residual)
        return add_rms_norm_fp8(x, residual, self.weight, self.eps, form)
