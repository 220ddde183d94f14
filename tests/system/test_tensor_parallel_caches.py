"""Two and four ranks give the tokens of one with windows, states and latent rows, after hits, preemption and sleep."""

from pathlib import Path
from typing import Any

import pytest

from proa_engine.core.operations import Sleep, WakeUp
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

WINDOWS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": WINDOWS,
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "deepseek_v3": LATENT,
    "gpt_oss": {},
    "gemma4_text": WINDOWS | {"global_head_dim": 32, "num_kv_shared_layers": 2},
    # Through transformers, by the library's plan of the type
    "cohere2": WINDOWS,
    "gpt_neox": {},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 16},
    "starcoder2": {},
}
WHOLE_ROWS = ("deepseek_v3", "minimax_m2")  # each rank caches all heads, or the latent rows of all


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_give_the_tokens_of_one(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / family, family, **({"seed": 3} | FAMILIES[family]))
    with build_core(folder, enable_prefix_caching=False, **CONFIG) as alone:
        expected = generate(alone, "alone", PROMPTS)
        [whole] = alone.executor.started.rank_sizes
    with build_core(folder, tensor_parallel_size=2, num_gpu_blocks_override=40, **CONFIG) as engine:
        assert_equal_after_preemption_and_hits(engine, expected)
        operate(engine, Sleep(1))
        operate(engine, WakeUp())
        awake = generate(engine, "awake", TWO)
        assert not any(each.num_cached_tokens for each in awake)
        assert_equal_where_sure(awake, expected[:2])
        first, second = engine.executor.started.rank_sizes
    assert first.cache == second.cache
    assert first.block_bytes == second.block_bytes
    assert first.block_bytes == whole.block_bytes // (1 if family in WHOLE_ROWS else 2)


@pytest.mark.parametrize(
    ("family", "fields", "shares"),
    [
        # Key heads and KV heads are on two ranks each, value heads are divided unevenly.
        ("qwen3_5_text", {}, [1 / 2] * 4),
        ("llama", {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 5}, [3 / 5, 2 / 5]),
        ("cohere2", WINDOWS, [1 / 2] * 4),
    ],
)
def test_ranks_with_copies_or_unequal_shares_of_heads_give_the_tokens_of_one(
    family: str, fields: dict[str, Any], shares: list[float], tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / family, family, **({"seed": 3} | fields))
    with build_core(folder, enable_prefix_caching=False, **CONFIG) as alone:
        expected = generate(alone, "alone", PROMPTS)
        [whole] = alone.executor.started.rank_sizes
    config: dict[str, Any] = {"tensor_parallel_size": len(shares), "num_gpu_blocks_override": 40}
    with build_core(folder, kv_offloading_size=0.01, **CONFIG, **config) as engine:
        assert_equal_after_preemption_and_hits(engine, expected)
        sizes = engine.executor.started.rank_sizes
    assert [each.block_bytes for each in sizes] == [share * whole.block_bytes for share in shares]
