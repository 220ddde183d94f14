"""RMSNorm, optionally after a residual add, with its result quantized or deferred as the next product requires."""

import torch

from proa_engine.kernels.activation import Activation, InputForm
from proa_engine.kernels.fp8 import Fp8Form
from proa_engine.kernels.rms_norm import add_rms_norm, add_rms_norm_fp8, rms_norm, rms_norm_fp8
from proa_engine.kernels.skinny_gemm import SkinnyGemm, unnormed_rows
from proa_engine.layers.weights import Weights


class RMSNorm:
    def __init__(self, weights: Weights, size: int, eps: float) -> None:
        self.weight = weights.take("weight", (size,))
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape, normalised over the last dimension."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, size] -> (norm(x + residual), x + residual), [T, size] each; may overwrite both inputs."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def into(
        self, form: InputForm | None, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[Activation, torch.Tensor]:
        """x, residual [T, size] -> (norm(x + residual), x + residual), the norm in the form that the next product
        requires.

        May overwrite both inputs. If the product computes the norm, the sum is valid only after the product.
        """
        if isinstance(form, SkinnyGemm) and form.holds(x.shape[0]):
            rows = unnormed_rows(x, residual, self.weight, self.eps)
            return rows, rows.total
        if isinstance(form, Fp8Form):
            if residual is None:
                return rms_norm_fp8(x, self.weight, self.eps, form), x
            return add_rms_norm_fp8(x, residual, self.weight, self.eps, form)
        return (self(x), x) if residual is None else self.add(x, residual)
