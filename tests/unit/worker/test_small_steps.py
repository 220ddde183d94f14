"""Small steps run on one thread; torch's thread count is restored afterwards."""

from collections.abc import Iterator

import pytest
import torch

from proa_engine.step.device_thread import SmallSteps


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 1), (4, 1), (5, 2), (1000, 2)])
def test_a_small_step_has_one_thread(num_tokens: int, expected: int) -> None:
    with SmallSteps(4).one_thread(num_tokens):
        assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == 2


def test_the_thread_count_is_restored_after_an_exception() -> None:
    with pytest.raises(RuntimeError), SmallSteps(1).one_thread(1):
        raise RuntimeError
    assert torch.get_num_threads() == 2


def test_no_step_is_small_if_the_limit_is_zero() -> None:
    with SmallSteps(0).one_thread(1):
        assert torch.get_num_threads() == 2
