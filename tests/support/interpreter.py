"""Run the cases of `support.kernels` in Triton's interpreter and report each by its name.

The interpreter is chosen by TRITON_INTERPRET, which is read when a kernel is defined, so the cases run in a process of
their own: this module as a program. It reads the names of checks, one a line, and prints one line of JSON for each: the
traceback of a failure, or null.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton import language
from triton.runtime import interpreter

from proa_engine.kernels.launch import META_MULTIPROCESSORS
from support.kernels.case import INTERPRETED_DTYPES, Case, cases_of

NUM_MULTIPROCESSORS = 16  # of few, because each has programs without work, which also take the interpreter's time


def checks_of(rooms: Iterable[str]) -> dict[str, tuple[Case, torch.dtype]]:
    """The cases of these rooms that have shapes for the interpreter, by names such as `norms.rms_norm-float32`. In 16
    bits every kernel is compiled by `make system`, and computes in `make test-all` and on GPUs."""
    return {
        f"{name}-{str(dtype).removeprefix('torch.')}": (case, dtype)
        for room in rooms
        for name, case in cases_of(room).items()
        if case.interpreted
        for dtype in INTERPRETED_DTYPES
    }


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
    META_MULTIPROCESSORS.set(NUM_MULTIPROCESSORS)
    for line in sys.stdin:
        name = line.strip()
        case, dtype = checks_of([name.partition(".")[0]])[name]
        failure = None
        for shape in case.interpreted:
            try:
                case.check(dtype, "cpu", shape)
            except Exception:
                failure = f"{shape}\n{traceback.format_exc()}"
                break
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


@contextmanager
def ordered_sums(device: str) -> Iterator[None]:
    """In the interpreter, sum up each element of a product in the same order wherever in the tile it is, as tensor
    cores do; the library that the interpreter multiplies by treats a tile's last rows otherwise."""

    def dot(_builder: Any, a: Any, b: Any, d: Any, *_options: Any) -> Any:
        total = d.data.copy()
        for k in range(a.data.shape[1]):
            total += a.data[:, k, None].astype(total.dtype) * b.data[None, k, :].astype(total.dtype)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    with mock.patch.object(interpreter.InterpreterBuilder, "create_dot", dot) if device == "cpu" else nullcontext():
        yield


if __name__ == "__main__":
    main()
