"""Kernels compiled for GPUs that are not Hopper's, without one. `make gpu-static CAPABILITY=…` compiles those of all
models."""

import json

import pytest

from support.kernel_facts import GPUS, HOPPER, KernelFacts
from support.own_process import run_compiling
from support.thorough import THOROUGH

# The others have the tensor cores' instructions of an A100, or tiles as an L4 has them.
CAPABILITIES = sorted(GPUS.keys() - {HOPPER.capability}) if THOROUGH else [100]
pytestmark = pytest.mark.timeout(600)


def test_the_largest_tiles_fit_into_the_shared_memory_of_an_l4() -> None:
    printed = run_compiling("support.small_kernels", timeout=500)
    kernels = [line.split() for line in printed.splitlines()]
    assert {name for name, _ in kernels} > {
        "delta_rule_scan_kernel",
        "decode_attention_kernel",
        "latent_prefill_kernel",
        "prefill_attention_kernel",
    }
    assert not [kernel for kernel in kernels if int(kernel[1]) > GPUS[89].most_shared_bytes]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_smallest_models_kernels_run_on_other_gpus(capability: int) -> None:
    printed = run_compiling("support.compiled_kernels", str(capability), timeout=580)
    lines = [json.loads(line) for line in printed.splitlines()]
    compiled = [KernelFacts(**{name: value for name, value in line.items() if name != "cases"}) for line in lines]
    assert {facts.kernel for facts in compiled} > {"decode_attention_kernel", "prefill_attention_kernel"}
    assert not [facts for facts in compiled if facts.is_too_large]
