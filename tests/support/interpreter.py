"""Run checks of Triton kernels in Triton's interpreter and report each by its name.

The interpreter is chosen by TRITON_INTERPRET, which is read when a kernel is defined, so the checks run in a process of
their own. It prints one line of JSON a check: the traceback of a failure, or null.
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
    """Run the checks named by lines of stdin and print each result. Call it in a process with TRITON_INTERPRET=1."""
    known = {check_name(check, dtype): (check, dtype) for dtype, check in itertools.product(TOLERANCE, checks)}
    for line in sys.stdin:
        check, dtype = known[line.strip()]
        torch.manual_seed(0)
        failure = None
        try:
            check(dtype)
        except Exception:
            failure = traceback.format_exc()
        print(json.dumps(failure), flush=True)


class InterpreterProcess:
    """`python -m module`, which calls `run_checks`. It runs a check when a test asks for it, so that workers which
    share a module's tests run none twice."""

    def __init__(self, module: str) -> None:
        environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def failure(self, name: str) -> str | None:
        """Run the check `name`. Returns None if it passes, a traceback if not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{name}\n")
        except BrokenPipeError:
            return f"the process ended with status {self._process.wait()} before this check"
        line = self._process.stdout.readline()
        if not line:
            return f"the process ended with status {self._process.wait()} during this check"
        failure: str | None = json.loads(line)
        return failure

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
