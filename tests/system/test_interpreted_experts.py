"""Triton kernels of mixtures and of quantized weights equal their references in Triton's interpreter."""

from collections.abc import Iterator

import pytest

from support.interpreter import InterpreterProcess, checks_of
from support.kernels.case import SLOW_ROOMS


@pytest.fixture(scope="module")
def interpreter() -> Iterator[InterpreterProcess]:
    process = InterpreterProcess()
    yield process
    process.stop()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", checks_of(SLOW_ROOMS))
def test_kernel_equals_its_reference(name: str, interpreter: InterpreterProcess) -> None:
    failure = interpreter.failure(name)
    assert failure is None, failure
