"""Warm-up steps are as large as real ones can be, and no larger."""

import pytest

from proa_engine.config import EngineConfig
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.timing.step_costs import CONTEXT_ROW_TOKENS
from proa_engine.models.pooling_config import PoolingConfig
from proa_engine.worker.warmup import WarmUp
from support.runner import BLOCK_SIZE, VOCAB_SIZE, FakeModel, RunnerHarness

MAX_MODEL_LEN = 256  # of the harness


def warm_up(budget: int, max_num_seqs: int) -> tuple[WarmUp, FakeModel]:
    harness = RunnerHarness(max_num_seqs=max_num_seqs)
    config = EngineConfig(
        model="unused",
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_logprobs=2,
        block_size=BLOCK_SIZE,
    )
    groups = CacheGroups(num_blocks=3, block_size=BLOCK_SIZE)
    work = WarmUp(
        harness.runner,
        config,
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        groups=groups,
        pooling=PoolingConfig(),
        generates=True,
    )
    return work, harness.model


def sizes(model: FakeModel) -> list[int]:
    """Tokens of each step."""
    return [input_ids.numel() for input_ids, _, _ in model.calls]


@pytest.mark.parametrize(
    ("budget", "most"), [(100, 100), (MAX_MODEL_LEN, MAX_MODEL_LEN), (4096, 3 * (MAX_MODEL_LEN - 1))]
)
def test_the_largest_step_has_the_token_budget_or_what_all_slots_hold(budget: int, most: int) -> None:
    """Even if every slot is full, nothing is written past the end of the tables."""
    work, model = warm_up(budget, max_num_seqs=3)
    work.run_largest()
    assert sizes(model)[0] == most


def test_tilings_include_those_of_the_token_budget_and_of_all_slots() -> None:
    work, model = warm_up(budget=100, max_num_seqs=3)
    work.run_every_tiling()
    assert sorted(set(sizes(model))) == [1, 2, 3, 4, 8, 16, 32, 64, 100]


def test_attention_is_timed_behind_a_context_within_the_length_and_the_blocks() -> None:
    work, model = warm_up(budget=100, max_num_seqs=3)
    costs = work.run()
    rows, context = CONTEXT_ROW_TOKENS, MAX_MODEL_LEN - 1 - CONTEXT_ROW_TOKENS
    behind = [
        metadata
        for input_ids, positions, metadata in model.calls
        if input_ids.numel() == rows and positions[0].item() == context
    ]
    assert len(behind) == 2
    assert all(table.block_table.max() < 3 for metadata in behind for table in metadata.tables)
    assert min(costs.step, costs.token, costs.pair) > 0


def test_a_model_of_one_token_has_no_context() -> None:
    work, _ = warm_up(budget=1, max_num_seqs=1)
    assert work.run().pair == 0.0
