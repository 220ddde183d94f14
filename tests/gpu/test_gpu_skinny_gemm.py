"""Skinny products on a GPU: against their reference, and in a chain of dependent launches."""

from collections.abc import Callable, Iterator

import pytest
import torch

from proa_engine.kernels.skinny_gemm import MAX_ROWS, unnormed_rows
from proa_engine.kernels.skinny_gemm_linear import skinny_gemm_linear, skinny_gemm_linear_reference
from proa_engine.worker.decode_graphs import CudaGraphCapture
from support.kernel_cases import skinny_gemm_cases

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
@torch.inference_mode()  # as engines record: the generator's state is theirs too
def test_a_captured_chain_equals_its_kernels_launched_one_by_one(hidden: int, inner: int) -> None:
    """Each kernel starts before the previous one has ended; memory is reused, as in a CUDA graph."""
    layers = [
        (
            torch.randn(hidden, device="cuda").bfloat16(),
            (torch.randn(2 * inner, hidden, device="cuda") / hidden**0.5).bfloat16(),
            (torch.randn(hidden, inner, device="cuda") / inner**0.5).bfloat16(),
        )
        for _ in range(6)
    ]
    start = torch.randn(1, hidden, device="cuda").bfloat16()

    def chain(after_each: Callable[[], None]) -> torch.Tensor:
        x, residual = start, None
        for norm_weight, gate_up, down in layers:
            rows = unnormed_rows(x, residual, norm_weight, 1e-6)
            inner_rows = skinny_gemm_linear(rows, gate_up, gated=True)
            after_each()
            x, residual = skinny_gemm_linear(inner_rows, down), rows.total
            after_each()
        return x

    torch.use_deterministic_algorithms(False)  # or new memory is filled by kernels, which let nothing start early
    expected = chain(torch.cuda.synchronize)
    replay, result = CudaGraphCapture().capture(lambda: chain(lambda: None))
    for _ in range(200):
        replay()
        assert torch.equal(result, expected)
