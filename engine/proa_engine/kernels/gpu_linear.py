"""Matrix products on a GPU: y = x @ weight.T + bias. cuBLAS; for one or two rows a Triton kernel
(`skinny_gemm_linear`), which also fuses the norm before and the activation after the product."""

import torch
import torch.nn.functional as F

from proa_engine.kernels.invariant_linear import InvariantLinear
from proa_engine.kernels.linear import Linear
from proa_engine.kernels.silu_and_mul import silu_and_mul
from proa_engine.kernels.skinny_gemm import UnnormedRows, skinny_gemm_form, skinny_gemm_linear


class GpuLinear:
    """A weight [out_features, in_features] with an optional bias [out_features]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.input_form = skinny_gemm_form(weight)

    def __call__(self, x: torch.Tensor | UnnormedRows) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features]"""
        if self._are_few(x):
            return skinny_gemm_linear(x, self.weight, self.bias)
        assert isinstance(x, torch.Tensor)
        return F.linear(x, self.weight, self.bias)

    def gated(self, x: torch.Tensor | UnnormedRows) -> torch.Tensor:
        """x [rows, in_features] -> silu(gate) * up, [rows, out_features / 2], of outputs [gate | up]"""
        if self._are_few(x):
            return skinny_gemm_linear(x, self.weight, self.bias, gated=True)
        return silu_and_mul(self(x))

    def _are_few(self, x: torch.Tensor | UnnormedRows) -> bool:
        return self.input_form is not None and self.input_form.holds(x.shape[0])


def make_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, batch_invariant: bool = False
) -> Linear | GpuLinear | InvariantLinear:
    """Return the product by weight [out_features, in_features] for its device. On a CPU it is always
    batch-invariant."""
    if weight.is_cpu:
        return Linear(weight, bias)
    return InvariantLinear(weight, bias) if batch_invariant else GpuLinear(weight, bias)


class HeadLinear:
    """y[t, h] = x[t, h] @ weight[h].T. On a CPU a token's bits do not depend on the batch."""

    def __init__(self, weight: torch.Tensor) -> None:
        """weight [heads, out_features, in_features]"""
        self.weight = weight
        self.products = [Linear(each) for each in weight.unbind()] if weight.is_cpu else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, heads, in_features] -> [T, heads, out_features]"""
        if self.products is None:
            return torch.bmm(x.transpose(0, 1), self.weight.transpose(1, 2)).transpose(0, 1)
        pairs = zip(self.products, x.unbind(1), strict=True)
        return torch.stack([product(rows.contiguous()) for product, rows in pairs], dim=1)
