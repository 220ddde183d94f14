"""Every kernel variant that steps of real models launch, compiled for Hopper without a GPU. Which GPU Triton compiles
for is the process's own, hence a process of its own."""

import json
from typing import Any

import pytest

from support.kernel_facts import KernelFacts, copies_in_flight
from support.own_process import run_compiling

AMONG_THEM = {
    "accept_drafts_kernel",
    "add_drafts_kernel",
    "begin_drafts_kernel",
    "compare_drafts_kernel",
    "decode_attention_kernel",
    "delta_rule_chunk_kernel",
    "delta_rule_recurrent_kernel",
    "delta_rule_scan_kernel",
    "draw_chunk_kernel",
    "few_rows_kernel",
    "fp4_matmul_kernel",
    "fp8_block_matmul_kernel",
    "int_matmul_kernel",
    "int8_matmul_kernel",
    "invariant_linear_kernel",
    "keep_reads_kernel",
    "lora_expand_kernel",
    "lora_shrink_kernel",
    "moe_few_down_matmul_kernel",
    "moe_few_gate_matmul_kernel",
    "moe_int_matmul_kernel",
    "moe_matmul_kernel",
    "moe_fp4_matmul_kernel",
    "next_token_ids_kernel",
    "penalize_kernel",
    "prefill_attention_kernel",
    "prefill_hopper_kernel",
    "propose_ngrams_kernel",
    "replay_rows_kernel",
    "rms_norm_kernel",
    "router_kernel",
    "gated_group_norm_kernel",
    "short_conv_kernel",
    "short_conv_replay_kernel",
    "settle_rows_kernel",
    "ssd_recurrent_kernel",
    "ssd_scan_kernel",
    "ssd_scores_kernel",
    "skinny_fp8_kernel",
    "skinny_gemm_kernel",
    "token_bitmask_kernel",
}
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def compiled() -> list[KernelFacts]:
    """The program fails if steps of odd shapes launch variants that the engine's start does not."""
    printed = run_compiling("support.compiled_kernels", timeout=580)
    return [facts(json.loads(line)) for line in printed.splitlines()]


def facts(line: dict[str, Any]) -> KernelFacts:
    del line["cases"]
    return KernelFacts(**line)


def test_every_variant_compiles_for_hopper_and_none_is_compiled_while_requests_wait(
    compiled: list[KernelFacts],
) -> None:
    assert {facts.kernel for facts in compiled} > AMONG_THEM
    assert not [facts for facts in compiled if facts.is_too_large]


def test_hot_kernels_spill_no_registers(compiled: list[KernelFacts]) -> None:
    assert not [facts for facts in compiled if facts.is_hot and facts.spilled_bytes]


def test_loops_of_hot_kernels_have_copies_in_flight(compiled: list[KernelFacts]) -> None:
    loops = [facts for facts in compiled if facts.is_hot and facts.copies_in_flight]
    assert {facts.kernel for facts in loops} == {name for name in AMONG_THEM if "matmul" in name} | {
        "decode_attention_kernel",
        "delta_rule_scan_kernel",
        "few_rows_kernel",
        "prefill_attention_kernel",
        "ssd_scan_kernel",
        "invariant_linear_kernel",
    }
    assert not [facts for facts in loops if min(facts.copies_in_flight) == 0]


def test_a_loop_that_waits_for_all_of_its_copies_has_none_in_flight() -> None:
    ttgir = """
      %1:3 = scf.for %i = %c0 to %n step %c1 {
        %2 = ttg.async_wait %a {num = 3 : i32}
        %3:2 = scf.for %j = %c0 to %n step %c1 {
          %4 = tt.dot %b, %c, %d
        }
        %5 = ttng.warp_group_dot %b, %c, %d
        %6 = ttg.async_wait %e {num = 0 : i32}
      }
      scf.for %i = %c0 to %n step %c1 {
        %7 = ttg.async_wait %a {num = 4 : i32}
        %8 = tt.dot %b, %c, %d
      }
      scf.for %i = %c0 to %n step %c1 {
        %9 = ttg.async_wait %a {num = 0 : i32}
      }
    """
    assert copies_in_flight(ttgir) == [0, 0, 4]
