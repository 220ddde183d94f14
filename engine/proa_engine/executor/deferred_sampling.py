"""Starts the sampling of steps behind the execution of later ones, so that pipeline stages compute meanwhile."""

from collections import deque
from collections.abc import Callable, Collection, Sequence

from proa_engine.core.executor import StepFuture
from proa_engine.core.types import ModelRunnerOutput

StartSampling = Callable[[], StepFuture]


class DeferredSampling:
    """Steps that are executed and whose sampling has not started, oldest first.

    The first pipeline stage samples a step when the last one has computed it. Until then it executes `num_stages` - 1
    later steps, which must be launched before the sampling, as that waits. So a step's sampling starts when there are
    as many later steps, or when its result is waited for, whichever comes first. If a request of the step is removed
    from the workers it starts before that, because another request may get the slot that the sampling reads.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_later = num_stages - 1
        self._steps: deque[_Step] = deque()

    def add(self, request_ids: Sequence[str], start: StartSampling) -> StepFuture:
        """Have `start` called later, or call it now if the model has one stage. Returns the step's future.

        `request_ids` are the requests of its rows.
        """
        if not self._num_later:
            return start()
        step = _Step(self, request_ids, start)
        self._steps.append(step)
        if len(self._steps) > self._num_later:
            self._start_oldest()
        return step

    def remove(self, request_ids: Collection[str]) -> None:
        """Start the sampling of steps with any of these requests, which the workers are about to remove."""
        while any(not step.request_ids.isdisjoint(request_ids) for step in self._steps):
            self._start_oldest()

    def start(self, step: "_Step") -> None:
        """Start the sampling of `step`, and before that of earlier ones."""
        while step.started is None:
            self._start_oldest()

    def _start_oldest(self) -> None:
        step = self._steps.popleft()
        step.started = step.start()


class _Step:
    """StepFuture of a step whose sampling may not have started."""

    def __init__(self, queue: DeferredSampling, request_ids: Sequence[str], start: StartSampling) -> None:
        self.request_ids = frozenset(request_ids)
        self.start = start
        self.started: StepFuture | None = None
        self._queue = queue

    def done(self) -> bool:
        return self.started is not None and self.started.done()

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        self._queue.start(self)
        assert self.started is not None
        return self.started.result(timeout)
