"""Products of floats, and of 8-bit floats that are quantized on the way: few rows, adapters, batch-invariant ones."""

import itertools
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from proa_engine.kernels.fp8 import FP8, Fp8Form, QuantizedRows, dequantize_rows, quantize
from proa_engine.kernels.products import skinny_gemm
from proa_engine.kernels.products.few_rows import few_rows_linear_reference
from proa_engine.kernels.products.fp8_linear import Fp8BlockLinear, Fp8Linear, fp8_block_matmul
from proa_engine.kernels.products.gpu_linear import GpuLinear, invariant_linear
from proa_engine.kernels.products.lora_matmul import add_lora, add_lora_reference
from proa_engine.kernels.products.skinny_fp8 import skinny_fp8_linear, skinny_fp8_linear_reference
from proa_engine.kernels.products.skinny_gemm import (
    MAX_INPUTS_OF_TWO_ROWS,
    MAX_ROWS,
    skinny_gemm_linear,
    skinny_gemm_linear_reference,
    unnormed_rows,
)
from proa_engine.kernels.rms_norm import rms_norm_fp8
from proa_engine.kernels.silu_and_mul import silu_and_mul
from support.few_rows_products import few_rows_product, few_rows_products
from support.interpreter import ordered_sums
from support.kernel_cases import lora_cases, skinny_gemm_cases
from support.kernels.case import close, equal, grid, holds, near, on_device, table
from support.quantized_cases import FORMS, matrix_in_blocks, skinny_fp8_cases
from support.thorough import THOROUGH

# Of six kinds in each of five shapes: each kind once, and each shape. Whole tiles and parts in turn.
EVERY = 1 if THOROUGH else 5
FORM_DTYPES = (torch.float32, torch.bfloat16)
NUM_ROWS = (1, 2, 3, 17, 64)
MOST_ROWS = 130  # three tiles


def rounds_of_few_programs(device: str) -> AbstractContextManager[Any]:
    """In the interpreter, skinny products by programs that compute several tiles each."""
    if device != "cpu":
        return nullcontext()
    return mock.patch.object(skinny_gemm, "num_multiprocessors", return_value=1)


def same_rows(ours: torch.Tensor, theirs: torch.Tensor, float32: float) -> None:
    """A row has its bits whatever the others, but for float32 on a GPU, whose odd sizes are summed in another order."""
    tolerance = float32 if ours.is_cuda and ours.dtype == torch.float32 else 0.0
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@holds(
    interpreted=table("outputs inputs num_rows", (6, 123, 3), (30, 300, 3)),
    gpu=grid(
        table(
            "outputs inputs",
            *((6, 123), (1, 8), (50, 300), (1152, 896), (4096, 1024), (1024, 3072), (896, 4864), (3000, 4096)),
            (512, 14336),
        ),
        num_rows=[MAX_ROWS],
    ),
)
def skinny_products(dtype: torch.dtype, device: str, outputs: int, inputs: int, num_rows: int) -> None:
    """With all that may come around them."""
    with rounds_of_few_programs(device):
        for case in skinny_gemm_cases([(outputs, inputs)], num_rows, dtype, device=device):
            products = case.products(num_rows, skinny_gemm_linear)
            close(products, case.products(num_rows, skinny_gemm_linear_reference))
            for rows in range(1, MAX_ROWS):
                for ours, theirs in zip(case.products(rows, skinny_gemm_linear), products, strict=True):
                    same_rows(ours, theirs[:rows], 1e-5)


@holds(
    interpreted=table("outputs inputs", (124, 384)),
    gpu=table("outputs inputs", (6, 48), (300, 384), (1152, 896), (896, 4864), (3000, 4096), (512, 14336)),
    dtypes=FORM_DTYPES,
)
def skinny_products_of_8_bits(dtype: torch.dtype, device: str, outputs: int, inputs: int) -> None:
    most = MAX_ROWS if inputs <= MAX_INPUTS_OF_TWO_ROWS else 1
    with rounds_of_few_programs(device):
        for case in skinny_fp8_cases([(outputs, inputs)], most, dtype, device):
            products, expected = (
                case.products(most, skinny_fp8_linear),
                case.products(most, skinny_fp8_linear_reference),
            )
            # Numbers in the middle of two of 8 bits may be rounded to the other one, after a norm.
            near(products, expected, 0.01 if dtype == torch.bfloat16 else 0.005)
            if device == "cpu":
                torch.testing.assert_close(products[0], expected[0], atol=0.02, rtol=0.02)
            for rows in range(1, most):
                for ours, theirs in zip(case.products(rows, skinny_fp8_linear), products, strict=True):
                    same_rows(ours, theirs[:rows], 0.02)  # a number may be rounded to another of 8 bits


@holds(
    interpreted=grid(size=[256], form=FORMS),
    gpu=grid(size=[4096], form=FORMS),
    dtypes=(torch.bfloat16,),
)
def skinny_products_quantize_rows_as_beforehand(dtype: torch.dtype, device: str, size: int, form: str) -> None:
    """Multiplied by the identity, a row is what its 8 bits and scales stand for, bit for bit."""
    how = on_device(FORMS[form], device)
    identity = torch.eye(size, device=device).to(FP8)
    scales = torch.ones((size // 128, size // 128) if how.group else (size,), device=device)
    x = torch.randn(2, size).mul(3)
    x[1, :128] = 0
    x = x.to(device, dtype)
    with rounds_of_few_programs(device):
        equal(skinny_fp8_linear(x, identity, scales, None, how), dequantize_rows(quantize(x, how)).to(dtype))


@holds(interpreted=[{}])
def skinny_products_of_8_bits_in_float64(dtype: torch.dtype, device: str) -> None:
    """The product of quantized rows differs from one in float64 by the rounding of sums in half precision alone."""
    with rounds_of_few_programs(device):
        for case in skinny_fp8_cases([(24, 640), (6, 48), (5, 1040)], 2, torch.float32):
            ours = skinny_fp8_linear(case.x, case.weight, case.scales, None, case.form).double()
            weight, x = case.dense().double(), dequantize_rows(quantize(case.x, case.form)).double()
            assert ((ours - x @ weight.T).abs() < 2**-11 * (x.abs() @ weight.abs().T)).all()


@holds(interpreted=[{}])
def skinny_products_beside_the_launches_of_more_rows(dtype: torch.dtype, device: str) -> None:
    """Norm and quantization, the product of blocks, and SiLU, in one launch and in three."""
    form = Fp8Form(group=128)
    x, residual = torch.randn(2, 2, 384).to(dtype)
    norm_weight = torch.randn(384).to(dtype)
    weight, scales = matrix_in_blocks(256, 384)
    rows = unnormed_rows(x, residual, norm_weight, 1e-6)
    with rounds_of_few_programs(device):
        ours = skinny_fp8_linear(rows, weight, scales * 0.1, None, form, gated=True)
    quantized, total = rms_norm_fp8(x, residual, norm_weight, 1e-6, form)
    equal(rows.total, total)
    theirs = silu_and_mul(fp8_block_matmul(quantized, weight, scales * 0.1, None))
    torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0.02)


@holds(gpu=[{}], dtypes=(torch.bfloat16,))
def linear_layers_of_8_bits_give_few_rows_the_numbers_of_more(dtype: torch.dtype, device: str) -> None:
    for case in skinny_fp8_cases([(1024, 4096)], 16, dtype, device):
        kind = Fp8Linear if case.form.group is None else Fp8BlockLinear
        linear = kind(case.weight, case.scales, case.bias, case.form)
        multiply = linear.gated if case.gated else linear
        normed, _ = rms_norm_fp8(case.x, case.residual.clone(), case.norm_weight, 1e-6, case.form)
        x, residual = case.x[:MAX_ROWS], case.residual[:MAX_ROWS]
        expected, ours = multiply(normed), multiply(unnormed_rows(x, residual, case.norm_weight, 1e-6))
        assert isinstance(expected, torch.Tensor)
        near(ours, expected[:MAX_ROWS])


@holds(interpreted=[{}], gpu=[{}], dtypes=(torch.bfloat16, torch.float16))
def products_of_few_rows(dtype: torch.dtype, device: str) -> None:
    """Of 16 bits and 8, with one scale for each row or one for all; whole tiles and parts; bias and gate."""
    is_quick = device == "cpu" and not THOROUGH
    every = EVERY if device == "cpu" else 1
    for number, product in enumerate(itertools.islice(few_rows_products(dtype, device), 0, None, every)):
        expected = product.expected()
        for tiling in itertools.islice(product.tilings(), number % 2 if is_quick else 0, None, 2 if is_quick else 1):
            ours = product.compute(tiling)
            if device == "cpu":
                close(ours, expected)
            else:  # the tensor cores' quick sums of 8 bits keep 14 bits
                of_floats = 0.005 if dtype == torch.bfloat16 else 0.002
                near(ours, expected, of_floats if product.scales is None else 0.01)


@holds(
    gpu=grid(num_rows=(3, 16, 17, 33, 64, 65, 128, 129, 256), is_fp8=(False, True)),
    dtypes=(torch.bfloat16, torch.float16),
)
def linear_layers_of_few_rows(dtype: torch.dtype, device: str, num_rows: int, is_fp8: bool) -> None:
    """Of real sizes. The layer's choice of a kernel, whichever it is, three times."""
    form = Fp8Form() if is_fp8 else None
    for outputs, inputs in ((6144, 4096), (4096, 14336), (28672, 4096), (1024, 2048)):
        sizes, has_bias = (num_rows, outputs, inputs), outputs == 6144
        case = few_rows_product(*sizes, dtype, form, gated=False, has_bias=has_bias, device=device)
        linear: GpuLinear | Fp8Linear = GpuLinear(case.weight, case.bias)
        if form is not None:
            assert case.scales is not None
            linear = Fp8Linear(case.weight, case.scales, case.bias, form)
        x = case.x if isinstance(case.x, QuantizedRows) else case.x.contiguous()
        for gated in (False, True):
            expected = few_rows_linear_reference(x, case.weight, case.scales, case.bias, gated=gated)
            for _ in range(3):
                near(linear.gated(x) if gated else linear(x), expected)
        assert linear.few_rows is not None
        assert not linear.few_rows.arrived.any()


@holds(gpu=[{}], dtypes=(torch.bfloat16,))
def rows_for_a_product_of_8_bits_are_quantized_by_the_activation_or_by_that_product(
    dtype: torch.dtype, device: str
) -> None:
    form = Fp8Form()
    case = few_rows_product(64, 28672, 4096, dtype, form, gated=True, has_bias=False, device=device)
    assert case.scales is not None
    linear = Fp8Linear(case.weight, case.scales, None, form)
    assert isinstance(linear.gated(case.x, form), torch.Tensor)
    case = few_rows_product(300, 28672, 4096, dtype, form, gated=True, has_bias=False, device=device)
    many = linear.gated(case.x, form)
    assert isinstance(many, QuantizedRows)
    expected = quantize(linear.gated(case.x), form)
    near(many.values.float() * many.scales, expected.values.float() * expected.scales)


@holds(interpreted=[{}], gpu=[{}])
def adapters(dtype: torch.dtype, device: str) -> None:
    for case in lora_cases(dtype, device):
        ours, again, theirs = case.y.clone(), case.y.clone(), case.y.clone()
        for y in (ours, again):
            add_lora(y, case.x, case.matrices, case.tokens, batch_invariant=case.batch_invariant)
        add_lora_reference(theirs, case.x, case.matrices, case.tokens)
        close(ours, theirs)
        equal(ours, again)


@holds(
    interpreted=table("outputs inputs", (70, 90)),
    gpu=table("outputs inputs", (6, 123), (1152, 896), (4096, 1024), (896, 4864), (28672, 4096), (4096, 14336)),
)
def invariant_products(dtype: torch.dtype, device: str, outputs: int, inputs: int) -> None:
    """A row has its bits whatever the others, at different positions in a tile."""
    weight = torch.randn(outputs, inputs) / inputs**0.5
    x, bias = torch.randn(MOST_ROWS, inputs), torch.randn(outputs)
    x, weight, bias = (tensor.to(dtype).to(device) for tensor in (x, weight, bias))
    with ordered_sums(device):
        close(invariant_linear(x[:3], weight), F.linear(x[:3], weight))
        together = invariant_linear(x, weight, bias)
        close(together, F.linear(x, weight, bias))
        for count in NUM_ROWS:
            for first in (0, MOST_ROWS - count):
                rows = slice(first, first + count)
                assert torch.equal(invariant_linear(x[rows].clone(), weight, bias), together[rows]), (count, first)
