"""Cases of kernels can run: all shapes are the arguments of what takes them, those for GPUs too."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.kernels.case import ROOMS, Case, KernelCase, Property, cases_of, on_device

CASES = {name: case for room in ROOMS for name, case in cases_of(room).items()}


@pytest.mark.parametrize("name", CASES)
def test_shapes_are_arguments(name: str) -> None:
    case = CASES[name]
    assert case.interpreted or case.gpu
    for shape in (*case.interpreted, *case.gpu):
        inspect.signature(taker(case)).bind(**shape, **given(case))
    texts = [str(shape) for shape in case.gpu]
    assert len(set(texts)) == len(texts), "each is a test of its own"


def taker(case: Case) -> Callable[..., Any]:
    if isinstance(case, KernelCase):
        return case.make
    assert isinstance(case, Property)
    return case.hold


def given(case: Case) -> dict[str, object]:
    return {"dtype": torch.float32} | ({} if isinstance(case, KernelCase) else {"device": "cpu"})


def test_a_copy_has_the_strides_and_shares_memory_as_the_original_does() -> None:
    memory = torch.randn(4, 10)
    original = memory[:, 2:7], memory[:, 5:]
    first, second = on_device(original, "cpu")
    assert (first.stride(), first.storage_offset()) == ((10, 1), 2)
    assert torch.equal(first, original[0])
    second.zero_()
    assert not first[:, 3:].any()
    assert original[0][:, 3:].any()
