"""`Linear` keeps its promise with each instruction set that a processor may have."""

import json
import os
import subprocess
import sys

import pytest
import torch

# ONEDNN_MAX_CPU_ISA is an upper bound, so every processor runs with each of these values;
# ATEN_CPU_CAPABILITY is taken as it is.
INSTRUCTION_SETS = {"SSE41": "default", "AVX2": "avx2", "AVX512_CORE": "avx512", "DEFAULT": "avx512"}
ATEN_LEVELS = ("default", "avx2", "avx512")  # a processor that has one also has those before it


def aten_level(wanted: str) -> str:
    """`wanted`, or the highest level that this processor has if `wanted` is higher."""
    ours = torch.backends.cpu.get_cpu_capability().lower()
    highest = ATEN_LEVELS.index(ours) if ours in ATEN_LEVELS else 0
    return ATEN_LEVELS[min(ATEN_LEVELS.index(wanted), highest)]


@pytest.mark.parametrize(("onednn_isa", "aten"), list(INSTRUCTION_SETS.items()), ids=list(INSTRUCTION_SETS))
def test_rows_do_not_depend_on_their_number_with_any_instruction_set(onednn_isa: str, aten: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "ONEDNN_MAX_CPU_ISA": onednn_isa,
        "ATEN_CPU_CAPABILITY": aten_level(aten),
        "OMP_WAIT_POLICY": "passive",  # two threads that spin on a busy machine take ten times as long
    }
    command = [sys.executable, "-m", "support.linear_contract", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"broken": [], "unsupported": []}
