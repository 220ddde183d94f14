"""Skinny products of 8-bit floats in Triton's interpreter: against their reference, in float64, and beside the launches
that more rows take."""

from typing import Any
from unittest import mock

import torch

from proa_engine.kernels.fp8 import FP8, Fp8Form, dequantize_rows, quantize
from proa_engine.kernels.products import skinny_gemm
from proa_engine.kernels.products.fp8_linear import fp8_block_matmul
from proa_engine.kernels.products.skinny_fp8 import skinny_fp8_linear, skinny_fp8_linear_reference
from proa_engine.kernels.products.skinny_gemm import unnormed_rows
from proa_engine.kernels.rms_norm import rms_norm_fp8
from proa_engine.kernels.silu_and_mul import silu_and_mul
from support.interpreter import TOLERANCE, close
from support.quantized_cases import FORMS, matrix_in_blocks, skinny_fp8_cases


def check_products(dtype: torch.dtype) -> None:
    for case in skinny_fp8_cases([(124, 384)], 2, dtype):
        two, expected = case.products(2, multiply), case.products(2, skinny_fp8_linear_reference)
        for ours, theirs in zip(two, expected, strict=True):
            # Here and there a number in the middle of two of 8 bits is rounded to the other one, after a norm.
            assert (ours - theirs).abs().mean() < 0.005 * theirs.abs().mean()
        close(two[0], expected[0], 5 * TOLERANCE[torch.float16])
        for ours, theirs in zip(case.products(1, multiply), two, strict=True):
            assert torch.equal(ours, theirs[:1]), "a row has its bits whatever the others"


def check_rows_are_quantized_as_beforehand(dtype: torch.dtype) -> None:
    """Multiplied by the identity, a row is what its 8 bits and scales stand for, bit for bit."""
    identity = torch.eye(256).to(FP8)
    for form in FORMS:
        scales = torch.ones(2, 2) if form.group else torch.ones(256)
        x = torch.randn(2, 256).mul(3).to(dtype)
        x[1, :128] = 0
        expected = dequantize_rows(quantize(x, form)).to(dtype)
        assert torch.equal(multiply(x, identity, scales, None, form), expected)


def check_sums_in_float64(dtype: torch.dtype) -> None:
    """The product of quantized rows differs from one in float64 by the rounding of sums in half precision alone."""
    for case in skinny_fp8_cases([(24, 640), (6, 48), (5, 1040)], 2, torch.float32):
        ours = multiply(case.x, case.weight, case.scales, None, case.form).double()
        weight, x = case.dense().double(), dequantize_rows(quantize(case.x, case.form)).double()
        assert ((ours - x @ weight.T).abs() < 2**-11 * (x.abs() @ weight.abs().T)).all()


def check_beside_the_launches_of_more_rows(dtype: torch.dtype) -> None:
    """Norm and quantization, the product of blocks, and SiLU, in one launch and in three."""
    form = Fp8Form(group=128)
    x, residual = torch.randn(2, 2, 384).to(dtype)
    norm_weight = torch.randn(384).to(dtype)
    weight, scales = matrix_in_blocks(256, 384)
    rows = unnormed_rows(x, residual, norm_weight, 1e-6)
    ours = multiply(rows, weight, scales * 0.1, None, form, gated=True)
    quantized, total = rms_norm_fp8(x, residual, norm_weight, 1e-6, form)
    assert torch.equal(rows.total, total)
    close(ours, silu_and_mul(fp8_block_matmul(quantized, weight, scales * 0.1, None)), 5 * TOLERANCE[torch.float16])


def multiply(*operands: Any, gated: bool = False) -> torch.Tensor:
    """`skinny_fp8_linear` by few programs, of several rounds each."""
    with mock.patch.object(skinny_gemm, "num_multiprocessors", return_value=1):
        return skinny_fp8_linear(*operands, gated=gated)
