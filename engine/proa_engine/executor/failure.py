"""Failure: why an executor cannot run steps any more, and what waits for its steps meanwhile."""

from concurrent.futures import FIRST_COMPLETED, Future, wait
from threading import Lock
from typing import Any, TypeVar

from proa_engine.core.executor import ExecutorFailed
from proa_engine.core.types import ModelRunnerOutput

T = TypeVar("T")


class Failure:
    """Thread-safe. The first reason is kept."""

    def __init__(self) -> None:
        self._lock = Lock()  # of the steps, and of the change from none to a reason
        self._reason: Future[str] = Future()
        self._steps: set[Future[ModelRunnerOutput]] = set()  # not done

    @property
    def has_happened(self) -> bool:
        """False while steps can run."""
        return self._reason.done()

    @property
    def reason(self) -> str | None:
        """None while steps can run."""
        return self._reason.result() if self.has_happened else None

    def fail(self, reason: str) -> bool:
        """Make all current and later calls and steps raise ExecutorFailed. Returns False if they do so already."""
        with self._lock:
            if self._reason.done():
                return False
            self._reason.set_result(reason)
            steps, self._steps = self._steps, set()
        for step in steps:
            step.set_exception(ExecutorFailed(reason))
        return True

    def check(self) -> None:
        """Raise ExecutorFailed after a failure."""
        if self._reason.done():
            raise ExecutorFailed(self._reason.result())

    def wait_for(self, future: "Future[T]") -> T:
        """Return the future's result. Raises ExecutorFailed as soon as there is a failure, as a hung device never
        ends."""
        either: tuple[Future[Any], ...] = (future, self._reason)
        wait(either, return_when=FIRST_COMPLETED)
        if not future.done():
            self.check()
        return future.result()

    def begin_step(self) -> "Future[ModelRunnerOutput]":
        """Return the future of a step, which fails with the executor."""
        step: Future[ModelRunnerOutput] = Future()
        with self._lock:
            self._steps.add(step)
        return step

    def finish_step(self, step: "Future[ModelRunnerOutput]", output: ModelRunnerOutput) -> None:
        """Set the step's result unless it has failed meanwhile."""
        with self._lock:
            is_pending = step in self._steps
            self._steps.discard(step)
        if is_pending:
            step.set_result(output)
