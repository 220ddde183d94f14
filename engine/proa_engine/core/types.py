"""What crosses the core's borders: requests in, step plans to the executor, sampled tokens back, outputs out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, NamedTuple

from proa_engine.core.kv_events import KvNews
from proa_engine.core.sampling_params import SamplingParams


class FinishReason(IntEnum):
    """Why a request ended. Values equal `proa.engine.v1.FinishReason`."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


class EventType(IntEnum):
    """A step in a request's life. Values equal `proa.engine.v1.EventType`."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3
    RESUMED = 4
    FIRST_TOKEN = 5
    FINISHED = 6


@dataclass(frozen=True, slots=True)
class Event:
    type: EventType
    timestamp: float  # Unix seconds


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position, of the model's own distribution (before temperature and penalties)."""

    token_id: int
    logprob: float
    rank: int  # 1: the likeliest
    top_token_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreRequest:
    """One output sequence asked for. `client` names whom the outputs go to; it is the server's, not the wire's."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams
    priority: int = 0  # lower first
    cache_salt: str = ""
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    resumed_token_ids: Sequence[int] = ()
    arrival_time: float  # Unix seconds
    client: int = 0


@dataclass(slots=True, kw_only=True)
class EngineCoreOutput:
    """What one step says of one request: new tokens are deltas, counts are totals so far."""

    request_id: str
    client: int
    new_token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token that ended the output
    events: Sequence[Event] = ()
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    error: str = ""


RejectionCode = Literal["resource_exhausted", "invalid_argument", "already_exists"]


@dataclass(frozen=True, slots=True)
class Rejection:
    """A submitted request that the core did not take; it gets no outputs."""

    request_id: str
    client: int
    code: RejectionCode
    message: str  # a sentence for the user


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_waiting_tokens: int = 0  # known tokens of the waiting requests
    kv_cache_usage: float = 0.0  # share of blocks held by requests
    prefix_cache_queries: int = 0  # tokens looked up since start
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    spec_decode_num_drafts: int = 0  # since start, as all that follow: times that a request had drafts in a step
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineCoreOutputs:
    """One step's outputs, for all clients, and what it changed in the cache, for who follows."""

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats
    timestamp: float  # Unix seconds, when the step ended
    step: int
    rejections: Sequence[Rejection] = ()
    kv_news: KvNews | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequestData:
    """A request that a worker does not know: new, or preempted and planned again."""

    request_id: str
    token_ids: list[int]  # all tokens known to the host: prompt, then output so far
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling_params: SamplingParams
    trace_headers: Mapping[str, str] = field(default_factory=dict)  # set only for sampled traces


@dataclass(slots=True)
class CachedRequestData:
    """A request that the workers know: only what changed. Its tokens, the workers have: prompt, then what they sampled.

    Read-only, though not frozen: one is made for every request in every step, and freezing triples the cost.
    """

    request_id: str
    num_computed_tokens: int  # before this step
    new_block_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """One step's plan. The core sends it to the executor, which sends it to every worker.

    A request samples a token in this step if and only if the step computes the last of its tokens, sampled ones that
    the host does not know yet included. Where more is planned than that last one, the rest are drafts to be checked;
    how far such a request is then, only the workers know, and its `num_computed_tokens` are the most that it can be.
    A plan without tokens only tells ids; it has no rows, and no forward pass.
    """

    step: int
    new_requests: list[NewRequestData]
    cached_requests: list[CachedRequestData]
    num_scheduled_tokens: dict[str, int]  # request_id -> tokens to compute; its order is the batch's, ones first
    total_num_scheduled_tokens: int
    finished_request_ids: list[str]  # workers forget these before anything else in this plan
    preempted_request_ids: list[str]  # likewise; they come back as new requests

    @property
    def is_empty(self) -> bool:
        return self.total_num_scheduled_tokens == 0


class Drafts(NamedTuple):
    """A request's draft tokens in one step."""

    planned: int  # places that the plan had for them
    proposed: int  # found to be put there


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """One step's result on the host, rows in the order of the plan's `num_scheduled_tokens`."""

    request_ids: list[str]
    # One list a request; empty where its known tokens were not all computed yet, the accepted drafts first.
    sampled_token_ids: list[list[int]]
    drafts: list[Drafts] = field(default_factory=list)  # one a request; empty where the step had none
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # request_id -> one each sampled token
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # of this step's prompt tokens
