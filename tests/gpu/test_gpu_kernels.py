"""The kernels on a GPU: each case of `support.kernels` in the shapes that it has for GPUs."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from support.kernels.case import ROOMS, Case, Shape, cases_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def on_gpus(room: str) -> Iterator[Any]:
    for name, case in cases_of(room).items():
        for shape in case.gpu:
            text = ",".join(f"{key}={value}" for key, value in shape.items()).replace(" ", "")
            for dtype in case.dtypes:
                yield pytest.param(case, shape, dtype, id=f"{name}-{text}-{str(dtype).removeprefix('torch.')}")


@pytest.mark.parametrize(("case", "shape", "dtype"), [test for room in ROOMS for test in on_gpus(room)])
def test_kernel(case: Case, shape: Shape, dtype: torch.dtype) -> None:
    case.check(dtype, "cuda", shape)
