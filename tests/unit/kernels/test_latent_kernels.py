"""Kernels of latent attention equal their references."""

import pytest

from support.interpreted_latent_kernels import CHECKS
from support.interpreter import InterpreterProcess, check_names, interpreter_fixture

interpreter = interpreter_fixture("support.interpreted_latent_kernels")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", check_names(CHECKS))
def test_kernel_equals_its_reference(name: str, interpreter: InterpreterProcess) -> None:
    failure = interpreter.failure(name)
    assert failure is None, failure
