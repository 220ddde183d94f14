"""Programs of tests that compile kernels: which GPU Triton compiles for is the whole process's, so each has its own."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def run_compiling(module: str, *arguments: str, timeout: float) -> str:
    """Run a module of the tests as a program, which must succeed within `timeout` seconds; returns what it prints."""
    result = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
