"""Run checks of Triton kernels in Triton's interpreter and report each by its name.

The interpreter is chosen by TRITON_INTERPRET, which is read when a kernel is defined, so the checks run in a process of
their own: this module as a program. It reads the names of checks, one a line, and prints one line of JSON for each: the
traceback of a failure, or null.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from triton import language
from triton.runtime import interpreter

from proa_engine.kernels.launch import META_MULTIPROCESSORS
from support.thorough import THOROUGH

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}  # the interpreter computes bfloat16 wrongly
# In 16 bits every kernel is compiled by `make system`, and computes in `make test-all` and on GPUs.
DTYPES = tuple(TOLERANCE) if THOROUGH else (torch.float32,)
# Modules of this package, after "interpreted_"
QUICK = ("few_rows", "fp4", "int_weights", "kernels", "latent_kernels", "skinny_fp8", "state_kernels")
SLOW = ("few_experts", "int8", "quantized_kernels")
NUM_MULTIPROCESSORS = 16  # of few, because each has programs without work, which also take the interpreter's time

Check = Callable[[torch.dtype], None]


def checks_of(kinds: Iterable[str]) -> dict[str, tuple[Check, torch.dtype]]:
    """The functions `check_*` of some modules, by names such as `latent_kernels.latent_decode-float32`."""
    checks: dict[str, tuple[Check, torch.dtype]] = {}
    for kind in kinds:
        for name, check in vars(import_module(f"support.interpreted_{kind}")).items():
            if name.startswith("check_"):
                for dtype in DTYPES:
                    suffix = str(dtype).removeprefix("torch.")
                    checks[f"{kind}.{name.removeprefix('check_')}-{suffix}"] = check, dtype
    return checks


def patch_language() -> None:
    """Let the functions of Triton's language compute, for the rest of this process. The interpreter patches all of them
    in each call of a function of a kernel, and looks up each type in a new table: a third of the checks' time."""
    modules: Any = interpreter
    modules._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    modules._patch_lang = lambda function: modules._LangPatchScope()  # undoes nothing
    scalar_type = cache(modules._get_np_dtype)
    pointers = modules._get_np_dtype(language.pointer_type(language.int8))
    modules._get_np_dtype = lambda kind: pointers if kind.scalar.is_ptr() else scalar_type(kind.scalar)


def main() -> None:
    patch_language()
    checks = checks_of((*QUICK, *SLOW))
    META_MULTIPROCESSORS.set(NUM_MULTIPROCESSORS)
    for line in sys.stdin:
        check, dtype = checks[line.strip()]
        torch.manual_seed(0)
        failure = None
        try:
            check(dtype)
        except Exception:
            failure = traceback.format_exc()
        print(json.dumps(failure), flush=True)


class InterpreterProcess:
    """This module as a program. It runs a check when a test asks for it, so that workers which share the tests run none
    twice."""

    def __init__(self) -> None:
        environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.interpreter"],
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


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float | None = None) -> None:
    """Assert that two tensors of one shape agree within `tolerance`, absolute and relative; default: `TOLERANCE`."""
    tolerance = tolerance or TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


if __name__ == "__main__":
    main()
