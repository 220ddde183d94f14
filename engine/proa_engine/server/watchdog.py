"""Watchdog: a thread that detects late and hung steps.

A step is late after `step_timeout` (5 s) plus ten times its expected duration, and hung after a minute and forty times
that duration more, on one rank and on several: a slow rank delays all. A rank whose process ends is noticed without
this. An idle engine is never late.

The expected duration grows with the step's work (`StepCosts`). Counting finished layers instead would not do: a layer
of a chunk behind a million tokens takes minutes itself, a GPU's layers are launched long before they are computed,
those of a CUDA graph all at once, and rank 0 does not see the layers of other pipeline stages.

The watchdog runs apart from the main thread and the I/O thread, as either may hang.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

POLL_SECONDS = 0.2
LATE_FACTOR = 10
# Measured on a CPU with 30 busy processes for two cores: steps take 16 to 40 times as long as in the warm-up.
HUNG_FACTOR = 50
GRACE_SECONDS = 60.0  # for example to compile a kernel


class StepStatus(Enum):
    ON_TIME = auto()  # also: no step is running
    LATE = auto()
    HUNG = auto()


@dataclass(frozen=True, slots=True)
class StepDeadlines:
    """Seconds from a step's start until it is late, and until it is hung."""

    late: float
    hung: float

    @classmethod
    def of(cls, expected: float, *, step_timeout: float) -> "StepDeadlines":
        """Return the deadlines of steps that together should take `expected` seconds."""
        return cls(
            late=step_timeout + LATE_FACTOR * expected,
            hung=step_timeout + GRACE_SECONDS + HUNG_FACTOR * expected,
        )

    def status(self, step_age: float) -> StepStatus:
        """The status of a step that started `step_age` seconds ago."""
        if step_age <= self.late:
            return StepStatus.ON_TIME
        return StepStatus.LATE if step_age <= self.hung else StepStatus.HUNG


class Watchdog:
    """Checks the running step, and whether the engine has failed, every `POLL_SECONDS`."""

    def __init__(
        self,
        step_timeout: float,
        *,
        step_started_at: Callable[[], float | None],
        expected_seconds: Callable[[], float],
        failure: Callable[[], str | None],
        on_step_status: Callable[[StepStatus, float], None],
        on_failure: Callable[[str], None],
    ) -> None:
        """`step_started_at` returns the start of the running step on the monotonic clock, `expected_seconds` how long
        the steps in flight should take in all, which is only asked for a step older than `step_timeout`, and `failure`
        why the engine failed, or `None`. `on_step_status` is called at each change of status, with the step's age in
        seconds; `on_failure` once, with the failure. All five are called on the watchdog thread."""
        self._step_timeout = step_timeout
        self._step_started_at = step_started_at
        self._expected_seconds = expected_seconds
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
        age = 0.0 if started_at is None else now - started_at
        status = StepStatus.ON_TIME if age <= self._step_timeout else self._deadlines().status(age)
        if status is not self._status:
            self._status = status
            self._on_step_status(status, age)

    def _deadlines(self) -> StepDeadlines:
        return StepDeadlines.of(self._expected_seconds(), step_timeout=self._step_timeout)
