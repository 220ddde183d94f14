"""Executor: the interface between the core, which schedules steps, and the workers, which compute them."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from proa_engine.core.grammar import GrammarMasks
from proa_engine.core.types import ModelRunnerOutput, SchedulerOutput


class ExecutorFailed(RuntimeError):
    """A rank died, hung or raised, so no further step can finish. The message names the rank and the reason."""


class StepFuture(Protocol):
    """A step's result that may not have reached the host yet."""

    def done(self) -> bool: ...

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Wait for the step. Raises what the step raised."""
        ...


class Executor(Protocol):
    """Runs steps, in order, on one or several workers.

    `execute_model` starts a step's forward pass and returns at once. `sample_tokens` starts its sampling, with pipeline
    stages behind later forward passes or when the result is waited for, and must be called before the next
    `execute_model`. Only the future blocks. A step without tokens, which only carries finished
    and preempted ids, is run the same way; its result has no rows. `masks` may have masks only for rows in the step's
    `grammar_rows`.
    """

    def execute_model(self, scheduler_output: SchedulerOutput) -> None: ...

    def draft_tokens(self) -> Mapping[int, Sequence[int]]:
        """Return the draft tokens of the executed step's `grammar_rows`, by row, for those that have any.

        Waits until they are proposed, which is before the step's layers run, or behind them if a graph does both.
        """
        ...

    def sample_tokens(self, masks: GrammarMasks | None = None) -> StepFuture: ...

    def sleep(self, level: int) -> None:
        """Free the KV cache and, at level 2, the weights; level 1 moves a GPU's weights to host memory.

        No request may be unfinished, and no step may follow until `wake_up`.
        """
        ...

    def wake_up(self) -> None:
        """Allocate the memory that `sleep` freed. The content of the KV cache is lost."""
        ...

    def shutdown(self) -> None: ...
