"""Triton kernels equal their references in Triton's interpreter, but for the slow checks of `make system`."""

from collections.abc import Iterator

import pytest

from support.interpreter import QUICK, InterpreterProcess, checks_of


@pytest.fixture(scope="module")
def interpreter() -> Iterator[InterpreterProcess]:
    process = InterpreterProcess()
    yield process
    process.stop()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", checks_of(QUICK))
def test_kernel_equals_its_reference(name: str, interpreter: InterpreterProcess) -> None:
    failure = interpreter.failure(name)
    assert failure is None, failure
