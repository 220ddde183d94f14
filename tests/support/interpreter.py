"""Run checks of Triton kernels in Triton's interpreter and report each by its name.

The interpreter is chosen by TRITON_INTERPRET, which is read when a kernel is defined, so the checks run in a process of
their own. It prints one line of JSON a check: the name, and the traceback of a failure.
"""

import itertools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}  # the interpreter computes bfloat16 wrongly

Check = Callable[[torch.dtype], None]


def check_names(checks: Sequence[Check]) -> list[str]:
    return [check_name(check, dtype) for dtype, check in itertools.product(TOLERANCE, checks)]


def check_name(check: Check, dtype: torch.dtype) -> str:
    return f"{check.__name__.removeprefix('check_')}-{str(dtype).removeprefix('torch.')}"


def run_checks(checks: Sequence[Check]) -> None:
    """Run every check with every type and print its result. To be called in a process with TRITON_INTERPRET=1."""
    for dtype, check in itertools.product(TOLERANCE, checks):
        torch.manual_seed(0)
        failure = None
        try:
            check(dtype)
        except Exception:
            failure = traceback.format_exc()
        print(json.dumps([check_name(check, dtype), failure]), flush=True)


class InterpreterProcess:
    """`python -m module`, which calls `run_checks`. Results are read while the process runs."""

    def __init__(self, module: str) -> None:
        environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], env=os.environ | environment, stdout=subprocess.PIPE, text=True
        )
        self._failures: dict[str, str | None] = {}

    def failure(self, name: str) -> str | None:
        """Wait for the check `name`. Returns None if it passed, a traceback if not."""
        assert self._process.stdout is not None
        while name not in self._failures:
            line = self._process.stdout.readline()
            if not line:
                return f"the process ended with status {self._process.wait()} before this check"
            finished, failure = json.loads(line)
            self._failures[finished] = failure
        return self._failures[name]

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


def interpreter_fixture(module: str) -> Any:
    """A fixture of a test module: the process that runs the checks of `module`."""

    @pytest.fixture(scope="module")
    def interpreter() -> Iterator[InterpreterProcess]:
        process = InterpreterProcess(module)
        yield process
        process.stop()

    return interpreter


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float | None = None) -> None:
    """Assert that two tensors of one shape agree within `tolerance`, absolute and relative; default: `TOLERANCE`."""
    tolerance = tolerance or TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
