"""The kernels of 8 and 4 bits and of experts in Triton's interpreter: a program of its own, as in
test_interpreted_kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]


@pytest.mark.timeout(400)
def test_kernels_of_few_bits_and_experts_equal_their_references() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "support.interpreted_quantized_kernels"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" ok") == 22
