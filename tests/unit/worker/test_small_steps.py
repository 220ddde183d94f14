"""Small steps run on one thread; afterwards, and in others, torch has those that it had."""

from collections.abc import Iterator

import pytest
import torch

from proa_engine.worker.small_steps import SMALL_STEP, SmallSteps


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 1), (4, 1), (5, 2), (1000, 2)])
def test_a_step_has_one_thread_where_it_is_small(num_tokens: int, expected: int) -> None:
    with SmallSteps(SMALL_STEP // 4).one_thread(num_tokens):
        assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == 2


def test_a_step_that_fails_gives_the_threads_back() -> None:
    with pytest.raises(RuntimeError), SmallSteps(1).one_thread(1):
        raise RuntimeError
    assert torch.get_num_threads() == 2


def test_no_step_of_a_large_model_is_small() -> None:
    with SmallSteps(10**9).one_thread(1):
        assert torch.get_num_threads() == 2
