"""The Triton kernels in Triton's interpreter, against their references. The interpreter is chosen by an environment
variable that is read when a kernel is defined, hence a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_triton_kernels_equal_their_references() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "support.interpreted_kernels"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" ok") == 24
