"""Watchdog: knows when the current step began, and says when it is late and when there is no more hope.

A step is late after 5 s plus ten times the largest warm-up step; an idle engine is never late. The thread lives apart
from the one that steps and the one that talks, so it can act when either hangs.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

STEP_SECONDS = 5.0
WARM_UP_FACTOR = 10
POLL_SECONDS = 0.2


class Verdict(Enum):
    FINE = auto()
    LATE = auto()
    DEAD = auto()


@dataclass(frozen=True, slots=True)
class StepLimits:
    """In seconds: how long a step may run before it is late, and for how much longer there is hope."""

    late: float
    hope: float

    @classmethod
    def from_warm_up(cls, largest_step: float, *, step_timeout: float = STEP_SECONDS, hope: float) -> "StepLimits":
        return cls(late=step_timeout + WARM_UP_FACTOR * largest_step, hope=hope)

    def judge(self, step_age: float | None) -> Verdict:
        """`None`: no step is running."""
        if step_age is None or step_age <= self.late:
            return Verdict.FINE
        return Verdict.LATE if step_age <= self.late + self.hope else Verdict.DEAD


class Watchdog:
    """A thread that looks at the running step five times a second, and at whether the engine still stands."""

    def __init__(
        self,
        limits: StepLimits,
        *,
        step_started_at: Callable[[], float | None],
        failure: Callable[[], str | None],
        on_verdict: Callable[[Verdict, float], None],
        on_failure: Callable[[str], None],
    ) -> None:
        """`on_verdict` is told of each change, with the step's age in seconds; `failure` says why the engine cannot go
        on, once it cannot, and `on_failure` is told.
        Both are called on this thread."""
        self._limits = limits
        self._step_started_at = step_started_at
        self._failure = failure
        self._on_verdict = on_verdict
        self._on_failure = on_failure
        self._verdict = Verdict.FINE
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
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Judge the running step at this moment of the monotonic clock."""
        started_at = self._step_started_at()
        age = None if started_at is None else now - started_at
        verdict = self._limits.judge(age)
        if verdict is not self._verdict:
            self._verdict = verdict
            self._on_verdict(verdict, age or 0.0)
