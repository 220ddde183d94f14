"""Kernels of latent attention equal their references."""

from collections.abc import Iterator

import pytest

from support.interpreted_latent_kernels import CHECKS
from support.interpreter import InterpreterProcess, check_names


@pytest.fixture(scope="module")
def interpreter() -> Iterator[InterpreterProcess]:
    process = InterpreterProcess("support.interpreted_latent_kernels")
    yield process
    process.stop()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", check_names(CHECKS))
def test_kernel_equals_its_reference(name: str, interpreter: InterpreterProcess) -> None:
    failure = interpreter.failure(name)
    assert failure is None, failure
