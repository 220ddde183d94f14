"""SchedulerConfig: the limits and the policy that steps are scheduled by."""

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
    num_speculative_tokens: int = 0  # at most, per decode
    # Compute what a grammar forces in one step. Not with drafts; pays where a step of chunks costs little more than one
    # of decodes, as it does not where decodes replay CUDA graphs.
    compute_forced_tokens: bool = False
    eos_token_ids: frozenset[int] = frozenset()
    last_token_tasks: frozenset[PoolingTask] = frozenset()  # need the last token's hidden state only, no other's
    whole_prompts: bool = False  # pooled prompts are computed in one step: each token attends to all others

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, a prompt and an output, got {self.max_model_len}")
