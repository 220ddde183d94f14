"""What the core, the executor and the engine's front ends exchange and never send to clients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from proa.contract import EngineCoreOutput, SamplingParams, SchedulerStats, TokenLogprobs
from proa_engine.core.kv_events import KvEventBatch

RejectionCode = Literal["resource_exhausted", "invalid_argument", "already_exists"]


@dataclass(frozen=True, slots=True)
class Rejection:
    """A submitted request that the core did not accept. It gets no outputs."""

    request_id: str
    client_index: int
    code: RejectionCode
    message: str  # a sentence for the user


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """One step's results for all clients."""

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats
    timestamp: float  # Unix seconds, when the step ended
    step: int
    rejections: Sequence[Rejection] = ()
    kv_events: KvEventBatch | None = None  # set only while there are subscribers


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequestData:
    """A scheduled request that the workers do not hold: a new one, or one resumed after preemption."""

    request_id: str
    token_ids: list[int]  # all tokens known to the host: prompt, then output so far
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling_params: SamplingParams
    trace_headers: Mapping[str, str] = field(default_factory=dict)  # set only for sampled traces


@dataclass(slots=True)
class CachedRequestData:
    """A scheduled request that the workers hold: only what changed. They have its tokens, sampled ones included.

    Read-only, though not frozen: one is made for every request in every step, and freezing triples the cost.
    """

    request_id: str
    num_computed_tokens: int  # before this step
    new_block_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """One step, as the core schedules it and the executor sends it to every worker.

    A request samples a token in this step if and only if the step computes the last of its tokens, counting sampled
    ones that the host does not know yet. Tokens scheduled beyond that last one are drafts to verify; such a request's
    `num_computed_tokens` is an upper bound, and only the workers know the exact number. A step without tokens has no
    rows and no forward pass; it only carries finished and preempted ids.
    """

    step: int
    new_requests: list[NewRequestData]
    cached_requests: list[CachedRequestData]
    num_scheduled_tokens: dict[str, int]  # by request id, in the order of the batch's rows: those of one token first
    total_num_scheduled_tokens: int
    finished_request_ids: list[str]  # workers drop these before they run this step
    preempted_request_ids: list[str]  # likewise; they come back as new requests

    @property
    def is_empty(self) -> bool:
        return self.total_num_scheduled_tokens == 0


class Drafts(NamedTuple):
    """A request's draft tokens in one step."""

    planned: int  # that the scheduler made room for
    proposed: int  # that the drafter found


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """One step's result on the host. Rows are in the order of the step's `num_scheduled_tokens`."""

    request_ids: list[str]
    # One list per request: accepted drafts, then the sampled token. Empty if some known tokens are not computed yet.
    sampled_token_ids: list[list[int]]
    drafts: list[Drafts] = field(default_factory=list)  # one per request; empty if the step had none
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # by request id, one per sampled token
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # of this step's prompt tokens
