"""Ranks that divide the rows of latent attention by their tokens give the tokens of one rank; each holds its share."""

from pathlib import Path
from typing import Any

import pytest

from proa_engine.core.operations import Sleep, WakeUp
from proa_engine.json_configs import SpeculativeConfig
from support.engine import build_core
from support.parallel_equality import (
    CONFIG,
    PROMPTS,
    TWO,
    assert_equal_after_preemption_and_hits,
    assert_equal_where_sure,
    generate,
    operate,
)
from support.tiny_models import LATENT, make_tiny_model

DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("latent"), "deepseek_v3", **LATENT, seed=3)


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [(2, {"kv_offloading_size": 0.01, "speculative_config": DRAFTS}), (4, {})],
    ids=["two ranks with host memory and drafts", "four ranks"],
)
def test_ranks_with_a_share_of_the_latents_each_give_the_tokens_of_one(
    num_ranks: int, options: dict[str, Any], folder: Path
) -> None:
    with build_core(folder, enable_prefix_caching=False, **CONFIG) as alone:
        expected = generate(alone, "alone", PROMPTS)
        [whole] = alone.executor.started.rank_sizes
    parallel: dict[str, Any] = {"tensor_parallel_size": num_ranks, "decode_context_parallel_size": num_ranks}
    with build_core(folder, num_gpu_blocks_override=40, **CONFIG, **parallel, **options) as engine:
        assert_equal_after_preemption_and_hits(engine, expected)
        operate(engine, Sleep(1))
        operate(engine, WakeUp())
        assert_equal_where_sure(generate(engine, "awake", TWO), expected[:2])
        assert {sizes.block_bytes for sizes in engine.executor.started.rank_sizes} == {whole.block_bytes // num_ranks}


def test_a_model_without_latent_attention_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "qwen3", "qwen3")
    with (
        pytest.raises(ValueError, match="decode_context_parallel_size must be 1 for a model that has layers without"),
        build_core(folder, tensor_parallel_size=2, decode_context_parallel_size=2, **CONFIG),
    ):
        pass


def test_heads_that_ranks_do_not_divide_are_refused(tmp_path: Path) -> None:
    heads = {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 5}
    folder = make_tiny_model(tmp_path / "five heads", "deepseek_v3", **LATENT | heads)
    with (
        pytest.raises(ValueError, match=r"attention heads \(5\) cannot be divided by decode_context_parallel_size \(2"),
        build_core(folder, tensor_parallel_size=2, decode_context_parallel_size=2, **CONFIG),
    ):
        pass
