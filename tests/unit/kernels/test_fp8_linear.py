"""`Fp8Linear` on a GPU: a shape that cuBLAS refuses with scales by row is multiplied by one scale."""

from typing import Any

import pytest
import torch

from proa_engine.kernels import fp8
from proa_engine.kernels.fp8 import FP8, Fp8Form, QuantizedRows, check_device
from proa_engine.kernels.products.fp8_linear import Fp8Linear

NOT_SUPPORTED = "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic`"


def multiply(error: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Multiply 300 rows twice. Return the number of scales in each call of cuBLAS, which refuses scales by row."""
    called: list[int] = []

    def scaled_mm(x: torch.Tensor, weight: torch.Tensor, *, scale_a: torch.Tensor, **_: Any) -> torch.Tensor:
        called.append(scale_a.numel())
        if scale_a.numel() > 1:
            raise RuntimeError(error)
        return torch.empty(x.shape[0], weight.shape[1], device="meta")

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    with torch.device("meta"):
        weight, rows = torch.empty(256, 1024, dtype=FP8), torch.empty(300, 1024, dtype=FP8)
        linear = Fp8Linear(weight, torch.empty(256), torch.empty(256, dtype=torch.bfloat16), Fp8Form())
        x = QuantizedRows(rows, torch.empty(300, 1), torch.bfloat16)
    for _ in range(2):
        y = linear(x)
        assert (y.shape, y.dtype) == ((300, 256), torch.bfloat16)
    return called


def test_a_refused_shape_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert multiply(NOT_SUPPORTED, monkeypatch) == [300, 1, 1]


def test_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="illegal"):
        multiply("CUDA error: an illegal memory access was encountered", monkeypatch)


@pytest.mark.parametrize(("capability", "has_fp8"), [(80, False), (86, False), (89, True), (90, True), (120, True)])
def test_a_gpu_without_8_bit_floats_is_refused(capability: int, has_fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "capability", lambda device: capability)
    check_device(torch.device("cpu"))
    if has_fp8:
        check_device(torch.device("cuda"))
        return
    with pytest.raises(ValueError, match=f"compute capability 8.9 or later.*has 8.{capability % 10}"):
        check_device(torch.device("cuda"))
