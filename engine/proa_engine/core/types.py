"""What crosses the core's borders: requests in, step plans to the executor, sampled tokens back, outputs out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

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
    new_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token that ended the output
    events: list[Event] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_waiting_tokens: int = 0
    kv_cache_usage: float = 0.0  # share of blocks held by requests
    prefix_cache_queries: int = 0  # tokens looked up since start
    prefix_cache_hits: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class EngineCoreOutputs:
    """One step's outputs, for all clients."""

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats
    timestamp: float  # Unix seconds, when the step ended
    step: int


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRequestData:
    """A request that the workers know: only what changed."""

    request_id: str
    num_computed_tokens: int
    new_block_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """One step's plan. The core sends it to the executor, which sends it to every worker."""

    step: int
    new_requests: list[NewRequestData]
    cached_requests: list[CachedRequestData]
    num_scheduled_tokens: dict[str, int]  # request_id -> tokens to compute in this step; its order is the batch's
    total_num_scheduled_tokens: int
    finished_request_ids: list[str]  # workers forget these before anything else in this plan
    preempted_request_ids: list[str]  # likewise; they come back as new requests

    @property
    def is_empty(self) -> bool:
        return self.total_num_scheduled_tokens == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """One step's result on the host, rows in the order of the plan's `num_scheduled_tokens`."""

    request_ids: list[str]
    sampled_token_ids: list[list[int]]  # one list a request; empty where its known tokens were not all computed yet
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # request_id -> one each sampled token
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # of this step's prompt tokens
