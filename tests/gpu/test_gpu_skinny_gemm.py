"""Skinny products on a GPU: against their reference, and in a chain of dependent launches."""

from collections.abc import Iterator

import pytest
import torch

from proa_engine.kernels.fp8 import FP8, Fp8Form, dequantize_rows, quantize
from proa_engine.kernels.products.fp8_linear import Fp8BlockLinear, Fp8Linear
from proa_engine.kernels.products.skinny_fp8 import skinny_fp8_linear, skinny_fp8_linear_reference
from proa_engine.kernels.products.skinny_gemm import (
    MAX_INPUTS_OF_TWO_ROWS,
    MAX_ROWS,
    skinny_gemm_linear,
    skinny_gemm_linear_reference,
    unnormed_rows,
)
from proa_engine.kernels.rms_norm import rms_norm_fp8
from support.kernel_cases import skinny_gemm_cases
from support.launch_chain import check_captured_chain
from support.quantized_cases import FORMS, skinny_fp8_cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SHAPES = [(6, 123), (1, 8), (50, 300), (1152, 896), (4096, 1024), (1024, 3072), (896, 4864), (3000, 4096), (512, 14336)]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)


def assert_same_rows(ours: torch.Tensor, theirs: torch.Tensor, float32: float) -> None:
    """In 16 bits a row has its bits whatever the others. float32 shows that odd sizes are summed in another order."""
    tolerance = float32 if ours.dtype == torch.float32 else 0.0
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", SHAPES)
def test_products_with_all_that_may_come_around_them(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for case in skinny_gemm_cases([shape], MAX_ROWS, dtype, device="cuda"):
        products = case.products(MAX_ROWS, skinny_gemm_linear)
        for ours, theirs in zip(products, case.products(MAX_ROWS, skinny_gemm_linear_reference), strict=True):
            torch.testing.assert_close(ours, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        for num_rows in range(1, MAX_ROWS):
            for ours, theirs in zip(case.products(num_rows, skinny_gemm_linear), products, strict=True):
                assert_same_rows(ours, theirs[:num_rows], 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 48), (300, 384), (1152, 896), (896, 4864), (3000, 4096), (512, 14336)])
def test_products_of_8_bits_with_all_that_may_come_around_them(shape: tuple[int, int], dtype: torch.dtype) -> None:
    most = MAX_ROWS if shape[1] <= MAX_INPUTS_OF_TWO_ROWS else 1
    for case in skinny_fp8_cases([shape], most, dtype, device="cuda"):
        products = case.products(most, skinny_fp8_linear)
        for ours, theirs in zip(products, case.products(most, skinny_fp8_linear_reference), strict=True):
            # Numbers in the middle of two of 8 bits may be rounded to the other one, after a norm.
            error = (ours.float() - theirs.float()).abs().mean() / theirs.float().abs().mean()
            assert error < (0.005 if dtype == torch.float32 else 0.01), error
        for num_rows in range(1, most):
            for ours, theirs in zip(case.products(num_rows, skinny_fp8_linear), products, strict=True):
                assert_same_rows(ours, theirs[:num_rows], 0.02)  # a number may be rounded to another of 8 bits


@pytest.mark.parametrize("form", FORMS, ids=["rows", "groups", "static"])
def test_rows_are_quantized_as_by_the_kernel_for_more_rows(form: Fp8Form) -> None:
    identity = torch.eye(4096, device="cuda").to(FP8)
    scales = torch.ones((32, 32) if form.group else (4096,), device="cuda")
    form = Fp8Form(form.group, None if form.scale is None else form.scale.cuda())
    x = torch.randn(2, 4096, device="cuda").bfloat16()
    expected = dequantize_rows(quantize(x, form)).bfloat16()
    assert torch.equal(skinny_fp8_linear(x, identity, scales, None, form), expected)


def test_few_rows_of_8_bits_get_the_numbers_of_more_rows() -> None:
    for case in skinny_fp8_cases([(1024, 4096)], 16, torch.bfloat16, device="cuda"):
        kind = Fp8Linear if case.form.group is None else Fp8BlockLinear
        linear = kind(case.weight, case.scales, case.bias, case.form)
        multiply = linear.gated if case.gated else linear
        normed, _ = rms_norm_fp8(case.x, case.residual.clone(), case.norm_weight, 1e-6, case.form)
        x, residual = case.x[:MAX_ROWS], case.residual[:MAX_ROWS]
        expected, ours = multiply(normed), multiply(unnormed_rows(x, residual, case.norm_weight, 1e-6))
        assert isinstance(expected, torch.Tensor)
        assert isinstance(ours, torch.Tensor)
        expected = expected[:MAX_ROWS]
        assert (ours - expected).float().abs().mean() < 0.01 * expected.float().abs().mean()


@pytest.mark.parametrize(("hidden", "inner"), [(1024, 3072), (4096, 14336)])
def test_a_captured_chain_equals_its_kernels_launched_one_by_one(hidden: int, inner: int) -> None:
    torch.use_deterministic_algorithms(False)  # or new memory is filled by kernels, which let nothing start early
    check_captured_chain(hidden, inner, num_layers=6, num_replays=200)
