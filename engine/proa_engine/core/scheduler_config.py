"""SchedulerConfig: the limits and the policy of scheduling."""

from dataclasses import dataclass
from typing import Literal

from proa.contract import PoolingTask


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_waiting_requests: int = 4096
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool = True
    pipeline_parallel_size: int = 1  # stages
    num_speculative_tokens: int = 0  # maximum per decode
    # Numbers of a step's rows, ascending from 1, and the draft tokens of decodes in steps of at least so many.
    draft_schedule: tuple[tuple[int, int], ...] = ()
    measures_drafts: bool = False  # without a schedule: use the number that is measured to be best, not the maximum
    # Compute the tokens that a grammar forces in one step. It pays only where a step with chunks costs little more than
    # one with decodes alone, so not where decodes replay CUDA graphs.
    compute_forced_tokens: bool = False
    eos_token_ids: frozenset[int] = frozenset()
    last_token_tasks: frozenset[PoolingTask] = frozenset()  # tasks that need the hidden state of the last token only
    whole_prompts: bool = False  # pooled prompts are computed in one step: each token attends to all others

    @property
    def max_steps_in_flight(self) -> int:
        """Number of steps that may be in flight when the next one is scheduled. There is a step for each stage."""
        if self.pipeline_parallel_size > 1:
            return self.pipeline_parallel_size - 1
        return 1 if self.async_scheduling else 0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, a prompt and an output, got {self.max_model_len}")
