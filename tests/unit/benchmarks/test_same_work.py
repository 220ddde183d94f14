"""What every engine of a comparison must do: the same lengths, contexts and sampling parameters."""

import pytest

from benchmarks.engine.bench import FULL, own_sampling, split_sampling
from benchmarks.real_shapes import SHAPES

DOCUMENTED_CONTEXT = 584  # docs/performance.md: tokens that a step of `decode-B` attends to, on average


def test_mixed_has_one_list_of_lengths_and_three_runs() -> None:
    assert len(FULL.mixed) == 256
    assert all(100 <= tokens <= 1024 for lengths in FULL.mixed for tokens in lengths)
    assert FULL.rounds == 3


def test_decodes_attend_to_as_many_tokens_as_is_documented() -> None:
    assert FULL.context + FULL.decode_after + FULL.decode_steps / 2 == DOCUMENTED_CONTEXT


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("Qwen3-0.6B", {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ("Qwen3-30B-A3B", {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ("Llama-3.1-8B", {"temperature": 0.6, "top_p": 0.9}),
    ],
)
def test_own_workloads_sample_as_the_models_files_say(model: str, expected: dict[str, float]) -> None:
    assert own_sampling(SHAPES[model]) == expected


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        ("decode-1", ("", "decode-1")),
        ("own-http-64x1", ("own-", "http-64x1")),
        ("penalties-decode-64", ("penalties-", "decode-64")),
        ("grammar-mixed", ("grammar-", "mixed")),
    ],
)
def test_a_workload_says_in_front_how_tokens_are_sampled(workload: str, expected: tuple[str, str]) -> None:
    assert split_sampling(workload) == expected


def test_a_model_without_known_sampling_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="no sampling parameters of GptOssForCausalLM"):
        own_sampling(SHAPES["gpt-oss-20b"])
