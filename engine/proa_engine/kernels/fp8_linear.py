"""Matrix products of 8-bit floats: y = x @ weight.T + bias, both quantized, summed in float32.

With one scale for each row of x and each output of the weight: cuBLAS through `torch._scaled_mm`. With one for each 128
inputs of a row and each 128 x 128 block of the weight: a Triton kernel. On a CPU, the reference: a float32 product of
dequantized tensors, which differs from the GPU's only in the rounding of sums.
"""

import torch

from proa_engine.kernels.fp8 import Fp8Form, QuantizedRows, dequantize_rows, quantize
from proa_engine.kernels.fp8_block_matmul import BLOCK, fp8_block_matmul
from proa_engine.kernels.linear import Linear

MULTIPLE = 16  # cuBLAS requires sizes that are multiples of this


class Fp8Linear:
    """weight [out_features, in_features] float8_e4m3fn, scales [out_features] float32."""

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, form: Fp8Form) -> None:
        self.shape = weight.shape
        self.form = form
        self.reference = None
        if weight.is_cpu:
            self.reference = _reference(weight.float() * scales[:, None], bias)
        elif weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE:
            raise ValueError(f"a matrix of {list(weight.shape)} on each rank cannot be multiplied in 8-bit floats")
        else:
            self.weight, self.scales, self.bias = weight.t(), scales[None, :].contiguous(), bias

    def __call__(self, x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features]"""
        rows = quantize(x, self.form)
        if self.reference is not None:
            return self.reference(dequantize_rows(rows)).to(rows.dtype)
        if rows.dtype != torch.bfloat16:
            return self._in_float32(rows)
        return torch._scaled_mm(
            rows.values,
            self.weight,
            scale_a=rows.scales,
            scale_b=self.scales,
            bias=self.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    def _in_float32(self, rows: QuantizedRows) -> torch.Tensor:
        """By-row scales come with bfloat16 alone."""
        one = torch.ones((), device=rows.values.device)
        y = torch._scaled_mm(rows.values, self.weight, scale_a=one, scale_b=one, out_dtype=torch.float32)
        y = y * rows.scales * self.scales
        return (y if self.bias is None else y + self.bias).to(rows.dtype)


class Fp8BlockLinear:
    """weight [out_features, in_features] float8_e4m3fn, scales [out_features / 128, in_features / 128] float32."""

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, form: Fp8Form) -> None:
        self.shape = weight.shape
        self.form = form
        self.reference = None
        if weight.is_cpu:
            self.reference = _reference(dequantize_blocks(weight, scales), bias)
        else:
            self.weight, self.scales, self.bias = weight, scales, bias

    def __call__(self, x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features]"""
        rows = quantize(x, self.form)
        if self.reference is not None:
            return self.reference(dequantize_rows(rows)).to(rows.dtype)
        return fp8_block_matmul(rows, self.weight, self.scales, self.bias)


def dequantize_blocks(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """A weight [out_features, in_features] with block scales -> float32 [out_features, in_features]"""
    by_output = scales.repeat_interleave(BLOCK, 0)[: weight.shape[0]]
    return weight.float() * by_output.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]


def _reference(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    return Linear(weight, None if bias is None else bias.float())
