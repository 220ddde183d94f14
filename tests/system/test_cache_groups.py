"""Windows in tables of their own, and states in slots, change no bit of what a model computes on a CPU."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from proa.contract import SamplingParams
from proa_engine.layers.cache_layers import CacheLayer
from proa_engine.memory.cache_plan import CachePlan, plan_caches
from proa_engine.worker import worker
from support.engine import Result, build_core, request, run
from support.tiny_models import BYTES, make_tiny_model

NUM_TOKENS = 24
TIGHT: dict[str, Any] = {"max_num_batched_tokens": 48, "num_gpu_blocks_override": 60, "max_model_len": 256}
WINDOWS: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 24,
}


def make_prompts() -> list[list[int]]:
    """Prompts around several windows long, many with one of two common prefixes."""
    rows = random.Random(7)
    shared = [rows.choices(range(BYTES), k=length) for length in (70, 33)]
    prompts = [rows.choices(range(BYTES), k=rows.randint(1, 120)) for _ in range(5)]
    return prompts + [rows.choice(shared) + rows.choices(range(BYTES), k=rows.randint(1, 40)) for _ in range(10)]


PROMPTS = make_prompts()


def results(folder: Path, **config: Any) -> tuple[list[Result], int]:
    """What two rounds of the prompts give, and the number of tables."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    with build_core(folder, poison=True, block_seed=3, **(TIGHT | config)) as engine:
        rounds = []
        for number in range(2):
            requests = [request(f"{number}-{index}", prompt, params) for index, prompt in enumerate(PROMPTS)]
            rounds += list(run(engine, requests).values())
        return rounds, engine.executor.started.cache_groups.num_tables


def in_one_table(layers: Sequence[CacheLayer], block_size: int, dtype: torch.dtype, _: int, own: range) -> CachePlan:
    return plan_caches(layers, block_size, dtype, 1, own)  # no window is shorter


def values(of: list[Result]) -> list[tuple[list[int], list[float]]]:
    return [(each.token_ids, [entry.logprob for entry in each.logprobs]) for each in of]


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("windows"), "gemma3_text", seed=3, **WINDOWS)


@pytest.fixture(scope="module")
def of_windows(windows: Path) -> list[Result]:
    return results(windows)[0]


@pytest.fixture(scope="module")
def mixed_shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of two sizes."""
    shapes: dict[str, Any] = {"global_head_dim": 48, "num_global_key_value_heads": 1}
    shapes |= {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True}
    return make_tiny_model(tmp_path_factory.mktemp("mixed"), "gemma4_text", seed=3, **WINDOWS, **shapes)


@pytest.mark.parametrize(("num_blocks", "num_hits"), [(60, 1), (600, 16)])
def test_windows_in_tables_of_their_own_give_the_bits_of_one_table(
    num_blocks: int, num_hits: int, windows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped, num_tables = results(windows, num_gpu_blocks_override=num_blocks)
    assert num_tables == 5
    assert sum(each.num_cached_tokens > 0 for each in grouped) >= num_hits
    monkeypatch.setattr(worker, "plan_caches", in_one_table)
    whole, num_tables = results(windows, num_gpu_blocks_override=num_blocks)
    assert num_tables == 1
    assert values(grouped) == values(whole)


def test_layers_of_several_shapes_give_the_bits_of_one_table(
    mixed_shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped, num_tables = results(mixed_shapes)
    assert num_tables > 1
    monkeypatch.setattr(worker, "plan_caches", in_one_table)
    assert values(grouped) == values(results(mixed_shapes)[0])


@pytest.mark.parametrize("change", [{"enable_prefix_caching": False}, {"async_scheduling": False}], ids=str)
def test_windows_give_the_same_bits_with_and_without(
    change: dict[str, Any], windows: Path, of_windows: list[Result]
) -> None:
    assert values(of_windows) == values(results(windows, **change)[0])


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("states"), "qwen3_5_text", seed=3)


@pytest.mark.parametrize(("num_blocks", "num_hits"), [(16, 1), (100, 8)])
def test_continued_states_give_the_bits_of_computed_ones(num_blocks: int, num_hits: int, states: Path) -> None:
    cached, _ = results(states, num_gpu_blocks_override=num_blocks, max_num_seqs=8)
    assert sum(each.num_cached_tokens > 0 for each in cached) >= num_hits
    plain, _ = results(states, num_gpu_blocks_override=num_blocks, max_num_seqs=8, enable_prefix_caching=False)
    assert values(cached) == values(plain)
