"""When the sampling of a step starts, with pipeline stages."""

from collections.abc import Callable
from concurrent.futures import Future

import pytest

from proa_engine.core.executor import StepFuture
from proa_engine.core.types import ModelRunnerOutput
from proa_engine.executor.deferred_sampling import DeferredSampling


class Steps:
    """Steps 0, 1, … of a queue; `started` are those whose sampling has started, in order."""

    def __init__(self, num_stages: int) -> None:
        self.queue = DeferredSampling(num_stages)
        self.started: list[int] = []
        self.futures: list[StepFuture] = []

    def add(self, *request_ids: str) -> None:
        number = len(self.futures)
        self.futures.append(self.queue.add(request_ids, self._starter(number)))

    def _starter(self, number: int) -> Callable[[], StepFuture]:
        def start() -> StepFuture:
            self.started.append(number)
            future: Future[ModelRunnerOutput] = Future()
            future.set_result(ModelRunnerOutput(plain_token_ids=[number]))
            return future

        return start


def test_with_one_stage_sampling_starts_at_once() -> None:
    steps = Steps(1)
    steps.add("a")
    assert steps.started == [0]


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_sampling_starts_behind_as_many_steps_as_there_are_later_stages(num_stages: int) -> None:
    steps = Steps(num_stages)
    for number in range(10):
        steps.add(str(number))
        assert steps.started == list(range(number - num_stages + 2))


def test_waiting_for_a_step_starts_its_sampling_and_that_of_earlier_ones() -> None:
    steps = Steps(4)
    for name in "abc":
        steps.add(name)
    assert not steps.futures[1].done()
    assert steps.futures[1].result().plain_token_ids == [1]
    assert steps.futures[1].done()
    assert steps.started == [0, 1]
    assert steps.futures[0].result().plain_token_ids == [0]
    assert steps.started == [0, 1]


def test_sampling_starts_before_a_request_of_the_step_is_removed() -> None:
    steps = Steps(4)
    for name in "abc":
        steps.add(name)
    steps.queue.remove(["x"])
    assert steps.started == []
    steps.queue.remove(["b"])
    assert steps.started == [0, 1]
