"""Small steps run on one thread; torch's thread count is restored afterwards."""

from collections.abc import Iterator

import pytest
import torch

from proa.contract import SamplingParams
from proa_engine.step.device_thread import SmallSteps
from support.runner import RunnerHarness, input_builder, make_batch


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def is_small(num_tokens: int, max_small_tokens: int) -> bool:
    plan = RunnerHarness().schedule({"a": ([1] * num_tokens, num_tokens, SamplingParams())})
    batch = make_batch(max_num_seqs=1, max_model_len=1024)
    inputs = input_builder(batch, max_small_tokens=max_small_tokens).build(plan)
    assert inputs is not None
    return inputs.is_small


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 1), (4, 1), (5, 2), (1000, 2)])
def test_a_small_step_has_one_thread(num_tokens: int, expected: int) -> None:
    with SmallSteps(4).one_thread(is_small(num_tokens, 4)):
        assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == 2


def test_the_thread_count_is_restored_after_an_exception() -> None:
    with pytest.raises(RuntimeError), SmallSteps(1).one_thread(True):
        raise RuntimeError
    assert torch.get_num_threads() == 2


def test_no_step_is_small_if_the_limit_is_zero() -> None:
    with SmallSteps(0).one_thread(is_small(1, 0)):
        assert torch.get_num_threads() == 2
