"""Watchdog: a thread that detects late and hung steps.

A step is late after `step_timeout` (5 s) plus ten times the longest warm-up step, and hung after a grace period more.
An idle engine is never late. The watchdog runs apart from the main thread and the I/O thread, as either may hang.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

WARM_UP_FACTOR = 10
POLL_SECONDS = 0.2
GRACE_SECONDS = 60.0  # from late to hung, for a step of a single process
GRACE_SECONDS_PARALLEL = 0.0  # with several ranks, where a late step means that a collective hangs


class StepStatus(Enum):
    ON_TIME = auto()  # also: no step is running
    LATE = auto()
    HUNG = auto()


@dataclass(frozen=True, slots=True)
class StepDeadlines:
    """Seconds from a step's start until it is late, and from then until it is hung."""

    late: float
    grace: float

    @classmethod
    def from_warm_up(cls, longest_step: float, *, step_timeout: float, num_ranks: int) -> "StepDeadlines":
        grace = GRACE_SECONDS_PARALLEL if num_ranks > 1 else GRACE_SECONDS
        return cls(late=step_timeout + WARM_UP_FACTOR * longest_step, grace=grace)

    def status(self, step_age: float | None) -> StepStatus:
        """The status of a step that started `step_age` seconds ago. `None`: no step is running."""
        if step_age is None or step_age <= self.late:
            return StepStatus.ON_TIME
        return StepStatus.LATE if step_age <= self.late + self.grace else StepStatus.HUNG


class Watchdog:
    """Checks the running step, and whether the engine has failed, every `POLL_SECONDS`."""

    def __init__(
        self,
        deadlines: StepDeadlines,
        *,
        step_started_at: Callable[[], float | None],
        failure: Callable[[], str | None],
        on_step_status: Callable[[StepStatus, float], None],
        on_failure: Callable[[str], None],
    ) -> None:
        """`step_started_at` returns the start of the running step on the monotonic clock, `failure` why the engine
        failed, or `None`. `on_step_status` is called at each change of status, with the step's age in seconds;
        `on_failure` once, with the failure. All four are called on the watchdog thread."""
        self._deadlines = deadlines
        self._step_started_at = step_started_at
        self._failure = failure
        self._on_step_status = on_step_status
        self._on_failure = on_failure
        self._status = StepStatus.ON_TIME
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proa-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            if (failure := self._failure()) is not None:
                self._on_failure(failure)
                return
            self.check_step(time.monotonic())

    def check_step(self, now: float) -> None:
        """Compare the running step with its deadlines. `now` is on the monotonic clock."""
        started_at = self._step_started_at()
        age = None if started_at is None else now - started_at
        status = self._deadlines.status(age)
        if status is not self._status:
            self._status = status
            self._on_step_status(status, age or 0.0)
