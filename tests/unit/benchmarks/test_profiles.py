"""What explains a figure: gaps and shares of a record of launches, and the floor of a step."""

import pytest

from benchmarks.engine.floors import Card, Step, floor_seconds, parts
from benchmarks.engine.timeline import Span, analyse, table
from benchmarks.kernels.static_steps import StaticEngine
from benchmarks.real_shapes import SHAPES
from proa_engine.json_configs import SpeculativeConfig

H200 = Card(bytes_per_second=4.25e12, flops_per_second=799e12)
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
EXPERTS = LLAMA_8B | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


def test_gaps_are_when_nothing_runs_and_overlaps_count_for_the_earlier_kernel() -> None:
    spans = [Span("a", 10, 14), Span("b", 12, 20), Span("a", 25, 26), Span("c", 26, 30)]
    profile = analyse(spans, 2, wall=20.0, floor={"all": 5.0})
    assert (profile.busy, profile.gaps) == (15 / 2, 5 / 2)
    assert [(kernel.name, kernel.calls, kernel.microseconds) for kernel in profile.kernels] == [
        ("b", 0.5, 3.0),
        ("a", 1.0, 2.5),
        ("c", 0.5, 2.0),
    ]
    assert {kernel.name: kernel.gap for kernel in profile.kernels} == {"a": 2.5, "b": 0.0, "c": 0.0}


def test_a_profile_of_nothing_is_a_table_too() -> None:
    from dataclasses import asdict

    assert "| all 0 |" in table(asdict(analyse([], 1, wall=1.0, floor={})))


def test_a_decode_of_one_reads_every_weight_once() -> None:
    seconds = floor_seconds(LLAMA_8B, Step.of_workload("decode-1", 0), H200, fp8=False)
    assert seconds == pytest.approx(3.53e-3, rel=0.01)  # 8.03 billion parameters but for the embedding, in 2 bytes


def test_a_long_prefill_is_bound_by_its_operations() -> None:
    step = Step.of_workload("prefill-1x8192", 0)
    products = sum(part.flops for part in parts(LLAMA_8B, step, fp8=False) if part.name != "attention")
    assert floor_seconds(LLAMA_8B, step, H200, fp8=False) > products / H200.flops_per_second > 0.13
    assert floor_seconds(LLAMA_8B, step, H200, fp8=True) < floor_seconds(LLAMA_8B, step, H200, fp8=False)


def test_one_row_reads_the_experts_it_meets_and_many_rows_read_all() -> None:
    one, many = (
        {part.name: part for part in parts(EXPERTS, Step(rows, 1, 0), fp8=False)}["experts"].num_bytes
        for rows in (1, 4096)
    )
    assert many / one == pytest.approx(16)


def test_floor_of_gpt_oss_has_experts_in_4_bits_and_windows() -> None:
    shape = SHAPES["gpt-oss-20b"]
    weights = sum(part.num_bytes for part in parts(shape, Step.of_workload("decode-256", 0), fp8=False))
    assert weights == pytest.approx(12.6e9, rel=0.01)  # all experts, each of 4.25 bits a weight
    (attention,) = (part for part in parts(shape, Step(1, 1, 4096), fp8=False) if part.name == "attention")
    assert attention.num_bytes == 12 * (4096 + 128) * 4 * 8 * 64


def test_only_quantization_to_fp8_gives_the_layers_of_a_shape_8_bits() -> None:
    drafts = SpeculativeConfig(method="mtp")
    assert StaticEngine("Llama-3.1-8B", "fp8").has_fp8
    assert not StaticEngine("Llama-3.1-8B", drafts=drafts).has_fp8
    assert not StaticEngine("Llama-3.1-8B", "int8").has_fp8
