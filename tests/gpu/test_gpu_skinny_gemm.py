"""Skinny products on a GPU: against their reference, and in a chain of dependent launches."""

from collections.abc import Iterator

import pytest
import torch

from proa_engine.kernels.skinny_gemm import MAX_ROWS, skinny_gemm_linear, skinny_gemm_linear_reference
from support.kernel_cases import skinny_gemm_cases
from support.launch_chain import check_captured_chain

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


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", SHAPES)
def test_products_with_all_that_may_come_around_them(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for case in skinny_gemm_cases([shape], MAX_ROWS, dtype, device="cuda"):
        products = case.products(MAX_ROWS, skinny_gemm_linear)
        for ours, theirs in zip(products, case.products(MAX_ROWS, skinny_gemm_linear_reference), strict=True):
            torch.testing.assert_close(ours, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        for num_rows in range(1, MAX_ROWS):
            for ours, theirs in zip(case.products(num_rows, skinny_gemm_linear), products, strict=True):
                assert torch.equal(ours, theirs[:num_rows]), "a row has its bits whatever the others"


@pytest.mark.parametrize(("hidden", "inner"), [(1024, 3072), (4096, 14336)])
def test_a_captured_chain_equals_its_kernels_launched_one_by_one(hidden: int, inner: int) -> None:
    torch.use_deterministic_algorithms(False)  # or new memory is filled by kernels, which let nothing start early
    check_captured_chain(hidden, inner, num_layers=6, num_replays=200)
