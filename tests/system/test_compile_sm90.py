"""Every kernel variant that steps of real models launch compiles for Hopper, without a GPU. Which GPU Triton compiles
for is the process's own, hence a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
AMONG_THEM = {
    "plain": {
        "decode_attention_kernel",
        "prefill_attention_kernel",
        "draw_chunk_kernel",
        "propose_ngrams_kernel",
        "accept_drafts_kernel",
        "moe_matmul_kernel",
        "skinny_gemm_kernel",
        "invariant_linear_kernel",
    },
    "quantized": {"fp8_block_matmul_kernel", "int4_matmul_kernel", "moe_matmul_kernel", "rms_norm_kernel"},
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("group", AMONG_THEM)
def test_every_variant_compiles_for_hopper_and_none_is_compiled_while_requests_wait(group: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "support.compiled_kernels", group],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    compiled = {line.split()[0].rpartition(".")[2] for line in result.stdout.splitlines() if line.endswith(" ok")}
    assert AMONG_THEM[group] < compiled
