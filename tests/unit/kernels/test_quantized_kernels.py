"""The kernels of 8 and 4 bits and of experts, in Triton's interpreter and compiled for Hopper: programs of their own,
as in test_interpreted_kernels and test_compile_sm90."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]


def run(module: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)} | variables,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )


@pytest.mark.timeout(400)
def test_kernels_of_few_bits_and_experts_equal_their_references() -> None:
    result = run("support.interpreted_quantized_kernels", TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" ok") == 22


@pytest.mark.timeout(400)
def test_kernels_of_few_bits_and_experts_compile_for_hopper() -> None:
    result = run("support.compiled_quantized_kernels")
    assert result.returncode == 0, result.stdout + result.stderr
    compiled = {line.split()[0].rpartition(".")[2] for line in result.stdout.splitlines() if line.endswith(" ok")}
    assert {"fp8_block_matmul_kernel", "int4_matmul_kernel", "moe_matmul_kernel", "rms_norm_fp8_kernel"} < compiled
