"""Executor: the seam between the core, which decides, and the workers, which compute."""

from typing import Protocol

from proa_engine.core.types import ModelRunnerOutput, SchedulerOutput


class ExecutorFailed(RuntimeError):
    """A rank died, hung or raised: no step that is pending or comes later can be finished. Says which rank and why."""


class StepFuture(Protocol):
    """A step's result that may not have reached the host yet."""

    def done(self) -> bool: ...

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Wait for the step. Raises what the step raised."""
        ...


class Executor(Protocol):
    """Runs planned steps, in order, on one or several workers.

    `execute_model` starts a step's forward pass and returns at once; `sample_tokens` starts its sampling, and must
    follow it before the next `execute_model`. Only the future waits. A plan without tokens comes the same way when
    nothing is left to run but workers still hold requests that ended: its result has no rows.
    """

    def execute_model(self, scheduler_output: SchedulerOutput) -> None: ...

    def sample_tokens(self) -> StepFuture: ...

    def shutdown(self) -> None: ...
