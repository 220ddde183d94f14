"""Steps that a worker makes up: as large as real ones become, and no larger."""

import pytest

from proa_engine.worker.warmup import StepLimits, WarmUp
from support.runner import BLOCK_SIZE, FakeModel, RunnerHarness

MAX_MODEL_LEN = 256  # of the harness


def warm_up(budget: int, max_num_seqs: int) -> tuple[WarmUp, FakeModel]:
    harness = RunnerHarness(max_num_seqs=max_num_seqs)
    limits = StepLimits(
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_model_len=MAX_MODEL_LEN,
        max_logprobs=2,
        block_size=BLOCK_SIZE,
        num_blocks=3,
    )
    return WarmUp(harness.runner, limits, lambda: None), harness.model


def sizes(model: FakeModel) -> list[int]:
    """Tokens of each step."""
    return [input_ids.numel() for input_ids, _, _ in model.calls]


@pytest.mark.parametrize(
    ("budget", "most"), [(100, 100), (MAX_MODEL_LEN, MAX_MODEL_LEN), (4096, 3 * (MAX_MODEL_LEN - 1))]
)
def test_the_largest_step_is_the_budget_or_what_all_slots_hold(budget: int, most: int) -> None:
    """Where every slot is full to its last token, nothing is written behind the tables' ends."""
    work, model = warm_up(budget, max_num_seqs=3)
    work.run_largest()
    assert sizes(model)[0] == most


def test_every_tiling_ends_with_that_of_the_budget() -> None:
    work, model = warm_up(budget=100, max_num_seqs=3)
    work.run_every_tiling()
    assert sorted(set(sizes(model))) == [1, 2, 4, 8, 16, 32, 64, 100]
