"""Two ranks give the tokens of one with windows in tables, states and latent rows, after hits, preemption and sleep."""

import random
from pathlib import Path
from typing import Any

import pytest

from proa.contract import SamplingParams
from proa_engine.core.operations import Operation, Sleep, WakeUp
from support.engine import Engine, Result, build_core, request, run
from support.tiny_models import BYTES, LATENT, make_tiny_model

MARGIN = 1e-4
CONFIG: dict[str, Any] = {"max_model_len": 128, "block_size": 8, "max_num_batched_tokens": 48, "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2)
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
ROWS = random.Random(5)
PROMPTS = [ROWS.choices(range(BYTES), k=ROWS.randint(24, 56)) for _ in range(10)]
TWO = PROMPTS[:2]


def operate(engine: Engine, operation: Operation[None]) -> None:
    done = engine.core.operate(operation)
    while not done.done():
        engine.core.step()


def generate(engine: Engine, name: str, prompts: list[list[int]]) -> list[Result]:
    return list(run(engine, [request(f"{name}-{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]).values())


def assert_equal_where_sure(actual: list[Result], expected: list[Result]) -> None:
    num_sure = 0
    for index, (told, reference) in enumerate(zip(actual, expected, strict=True)):
        margins = [step.top_logprobs[0] - step.top_logprobs[1] for step in reference.logprobs]
        sure = next((step for step, margin in enumerate(margins) if margin < MARGIN), len(margins))
        assert told.token_ids[:sure] == reference.token_ids[:sure], index
        num_sure += sure
    assert num_sure > 0.9 * sum(len(reference.token_ids) for reference in expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_give_the_tokens_of_one(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / family, family, **({"seed": 3} | FAMILIES[family]))
    with build_core(folder, enable_prefix_caching=False, **CONFIG) as alone:
        expected = generate(alone, "alone", PROMPTS)
        [whole] = alone.executor.rank_sizes
    with build_core(folder, tensor_parallel_size=2, num_gpu_blocks_override=40, **CONFIG) as engine:
        assert_equal_where_sure(generate(engine, "all", PROMPTS), expected)
        assert engine.core.stats().num_preemptions > 0
        generate(engine, "two", TWO)
        again = generate(engine, "again", TWO)
        assert all(each.num_cached_tokens > 0 for each in again)
        assert_equal_where_sure(again, expected[:2])
        operate(engine, Sleep(1))
        operate(engine, WakeUp())
        awake = generate(engine, "awake", TWO)
        assert not any(each.num_cached_tokens for each in awake)
        assert_equal_where_sure(awake, expected[:2])
        first, second = engine.executor.rank_sizes
    assert first.cache == second.cache
    assert first.block_bytes == second.block_bytes
    assert first.block_bytes == whole.block_bytes // (1 if family in WHOLE_ROWS else 2)
