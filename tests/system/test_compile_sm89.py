"""The kernels with the largest tiles, compiled for an L4 without a GPU: a program has less than half of Hopper's shared
memory there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MOST_SHARED_BYTES = 99 * 1024
pytestmark = pytest.mark.timeout(600)


def test_the_largest_tiles_fit_into_the_shared_memory_of_an_l4() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "support.small_kernels"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    kernels = [line.split() for line in result.stdout.splitlines()]
    assert {name for name, _ in kernels} > {
        "delta_rule_scan_kernel",
        "decode_attention_kernel",
        "latent_prefill_kernel",
        "prefill_attention_kernel",
    }
    assert not [kernel for kernel in kernels if int(kernel[1]) > MOST_SHARED_BYTES]
