"""The kernels with the largest tiles, compiled for an L4 without a GPU: a program has less than half of Hopper's shared
memory there."""

import pytest

from support.own_process import run_compiling

MOST_SHARED_BYTES = 99 * 1024
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
    assert not [kernel for kernel in kernels if int(kernel[1]) > MOST_SHARED_BYTES]
