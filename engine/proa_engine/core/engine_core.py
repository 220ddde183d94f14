"""EngineCore: the loop that turns requests into outputs. Knows no model, no device and no wire; only who comes next.

With asynchronous scheduling, step N+1 is planned and started before the host waits for step N.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum, auto
from queue import Empty, SimpleQueue

from proa.contract import EngineCoreOutput, EngineCoreRequest, SchedulerStats
from proa_engine.core.executor import Executor, StepFuture
from proa_engine.core.request import Request, RequestStatus
from proa_engine.core.scheduler import Scheduler
from proa_engine.core.types import Rejection, SchedulerOutput, StepOutputs


class _KvEvents(Enum):
    FOLLOW = auto()
    UNFOLLOW = auto()


_Message = EngineCoreRequest | tuple[str, ...] | _KvEvents | None  # a request, ids to abort, or a call to wake up


class EngineCore:
    """Runs steps on one thread; requests and aborts come from any thread.

    `step_started_at` is when the step that runs now began, on the monotonic clock; `None` between steps. `clock` gives
    the Unix time of events.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, *, clock: Callable[[], float] = time.time) -> None:
        self.step_started_at: float | None = None
        self._scheduler = scheduler
        self._kv_events = scheduler.kv_events
        self._executor = executor
        self._clock = clock
        self._max_in_flight = 1 if scheduler.config.async_scheduling else 0  # after a step returns
        self._in_flight: deque[tuple[list[Request], StepFuture]] = deque()
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._outputs: list[EngineCoreOutput] = []
        self._rejections: list[Rejection] = []
        self._num_steps = 0

    def submit(self, request: EngineCoreRequest) -> None:
        """Ask for a request, from any thread. A refusal comes with a step's outputs."""
        self._inbox.put(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests, from any thread. Ids that are not known are ignored."""
        self._inbox.put(tuple(request_ids))

    def follow_kv_events(self) -> None:
        """Send a snapshot of what the prefix cache holds with the next outputs, and what changes with all others."""
        self._inbox.put(_KvEvents.FOLLOW)

    def unfollow_kv_events(self) -> None:
        """Nobody wants the changes any more."""
        self._inbox.put(_KvEvents.UNFOLLOW)

    def wake(self) -> None:
        """End a `wait_for_work`, from any thread or a signal handler."""
        self._inbox.put(None)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        untold = self._outputs or self._rejections or self._kv_events.is_untold
        return self._scheduler.has_work or bool(self._in_flight or untold) or not self._inbox.empty()

    def wait_for_work(self, timeout: float | None = None) -> None:
        """Block, without using the CPU, until there is something to do, `wake` is called or `timeout` seconds pass."""
        if self.has_unfinished_requests():
            return
        with contextlib.suppress(Empty):
            self._read(self._inbox.get(timeout=timeout), self._clock())

    def step(self) -> StepOutputs | None:
        """Start the next step, finish the oldest if its turn has come, and say what is new; `None`: nothing.

        Raises what the executor raised; the engine cannot go on then.
        """
        self.step_started_at = time.monotonic()
        try:
            self._read_inbox()
            plan, requests = self._scheduler.schedule(self._clock())
            started = self._start(plan, requests)
            if len(self._in_flight) > (self._max_in_flight if started else 0):
                self._finish_oldest()
            return self._take_outputs()
        finally:
            self.step_started_at = None

    def stats(self) -> SchedulerStats:
        """How the scheduler stands now, from any thread."""
        return self._scheduler.stats

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, as after a change of weights. Only between steps, on their thread."""
        self._scheduler.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Raises `AssertionError` where the core contradicts itself. For tests."""
        self._scheduler.check_integrity()

    def _start(self, plan: SchedulerOutput, requests: list[Request]) -> bool:
        """Hand the plan to the executor, if it says anything."""
        if plan.is_empty and not (plan.finished_request_ids or plan.preempted_request_ids):
            return False
        self._executor.execute_model(plan)
        self._in_flight.append((requests, self._executor.sample_tokens()))
        return True

    def _finish_oldest(self) -> None:
        requests, future = self._in_flight.popleft()
        result = future.result()
        self._read_inbox()  # who was aborted meanwhile gets no more tokens
        self._outputs += self._scheduler.update_from_output(requests, result, self._clock())
        self._num_steps += 1

    def _read_inbox(self) -> None:
        now = self._clock()
        while not self._inbox.empty():  # only this thread takes from it
            self._read(self._inbox.get_nowait(), now)

    def _read(self, message: _Message, now: float) -> None:
        if isinstance(message, EngineCoreRequest):
            rejection = self._scheduler.add_request(message, now)
            if rejection is not None:
                self._rejections.append(rejection)
        elif message is _KvEvents.FOLLOW:
            self._kv_events.follow()
        elif message is _KvEvents.UNFOLLOW:
            self._kv_events.unfollow()
        elif isinstance(message, tuple):
            self._outputs += self._scheduler.finish_requests(message, RequestStatus.FINISHED_ABORTED, now)

    def _take_outputs(self) -> StepOutputs | None:
        kv_news = self._kv_events.take()
        if not (self._outputs or self._rejections or kv_news):
            return None
        outputs, self._outputs = self._outputs, []
        rejections, self._rejections = self._rejections, []
        return StepOutputs(outputs, self._scheduler.stats, self._clock(), self._num_steps, rejections, kv_news)
