"""What an engine answers: the outputs of its steps and its load."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

LOCAL = {"wire": False}  # metadata of a field that is not sent


class FinishReason(IntEnum):
    """Why a request ended."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    COMPLETE = 5  # the grammar allows no further token; unlike with STOP, the last token is part of the text
    REPETITION = 6  # the output repeats itself

    @property
    def public_name(self) -> str:
        """Its name for clients, in metrics and in traces: vLLM's, which has none of its own for COMPLETE."""
        return "stop" if self is FinishReason.COMPLETE else self.name.lower()


class EventType(IntEnum):
    """A change of a request's state in the engine."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3
    RESUMED = 4
    FIRST_TOKEN = 5
    FINISHED = 6


# Read-only by convention: freezing a dataclass triples the cost of making one, and these are made for every token.


@dataclass(slots=True)
class Event:
    type: EventType
    timestamp: float  # Unix seconds


@dataclass(slots=True)
class TokenLogprobs:
    """Log probabilities at one position, of the model's own distribution (before temperature and penalties)."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely
    top_token_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()


@dataclass(slots=True)
class KvFetch:
    """How a request waited for blocks from another engine, or from disk, before it was queued. Unix seconds."""

    started: float
    ended: float
    num_tokens: int
    num_bytes: int
    error: str = ""  # why it ended early


@dataclass(slots=True)
class KvLoad:
    """How a request waited for blocks from host memory, before it started or resumed. Unix seconds."""

    started: float
    ended: float
    num_tokens: int


@dataclass(slots=True, kw_only=True)
class EngineCoreOutput:
    """A request's output of one step, or of several merged ones: tokens are deltas, counts are totals so far."""

    request_id: str = ""  # empty in a Session, which uses handles
    handle: int = 0
    new_token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()  # one for each of `new_token_ids`, if requested
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # of the prompt tokens computed since the last output
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token that ended the output; None for an end of sequence token
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None  # set on the last output
    num_cached_tokens: int | None = None
    events: Sequence[Event] = ()
    error: str = ""
    pooled: bytes = b""  # little-endian float32 of a pooled request, row by row; on its last output
    num_pooled_rows: int = 0
    client_index: int = field(default=0, metadata=LOCAL)  # the engine server's number of the caller
    fetch: KvFetch | None = None  # on every output after it
    disk_read: KvFetch | None = field(default=None, metadata=LOCAL)  # likewise
    load: KvLoad | None = field(default=None, metadata=LOCAL)  # the last one, on every output after it

    @property
    def is_finished(self) -> bool:
        """Whether it is the request's last output."""
        return self.finish_reason is not None

    @property
    def public_stop_reason(self) -> int | str | None:
        """`stop_reason` for clients, as in vLLM."""
        return "repetition_detected" if self.finish_reason is FinishReason.REPETITION else self.stop_reason


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """An engine's load. Counters start with the engine."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0  # share of blocks held by requests, 0 to 1
    num_waiting_tokens: int = 0  # known tokens of the waiting requests
    prefix_cache_queries: int = 0  # tokens looked up in the prefix cache
    prefix_cache_hits: int = 0  # those of them that were found
    num_preemptions: int = 0
    last_step_age: float = 0.0  # seconds since the current step began; 0 between steps
    sleep_level: int = 0  # 1 or 2 of an engine that sleeps or is about to, and rejects new requests; 0: awake
    num_fetching_reqs: int = 0  # waiting ones whose blocks come from another engine
    host_cache_usage: float = 0.0  # share of host pages that hold cached blocks, 0 to 1
    prefill_tokens_per_second: float = 0.0  # of recent steps that computed prompts; 0: not known yet
    load_bytes_per_second: float = 0.0  # from host memory to the device, of all ranks; 0: not known yet
    num_retained_blocks: int = 0  # of all sessions, in use or free
    num_claimed_elsewhere: int = 0  # blocks that other gateways than the receiver retain or claim
    longest_wait_elsewhere: float = 0.0  # seconds that a turn has waited for room in another gateway; 0: none waits


@dataclass(slots=True, kw_only=True)
class EngineCoreOutputs:
    """One message of a Session: a step's outputs of that session's requests.

    A request that got exactly one token and nothing else is in the two plain columns instead of in `outputs`. Where
    steps were merged, a handle may occur in the columns several times, oldest first; its entry in `outputs` is newer.
    """

    outputs: Sequence[EngineCoreOutput] = ()
    plain_handles: Sequence[int] = ()
    plain_token_ids: Sequence[int] = ()  # one for each of `plain_handles`
    stats: SchedulerStats | None = None
    timestamp: float = 0.0  # Unix seconds, when the step ended; 0: no step had outputs for this session yet
    step: int = 0
