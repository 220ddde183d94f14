"""What the gateway and an engine tell each other, without protobuf: requests, outputs, statistics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from proa_gateway.routing.hints import HashChain


class FinishReason(IntEnum):
    """Why an output ended. Values equal `proa.engine.v1.FinishReason`."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How an engine chooses tokens; everything is resolved to token ids. Defaults are the contract's."""

    key: int  # 64-bit root of the sampling noise
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    max_tokens: int | None = None  # None: up to the context's end
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One output sequence asked of an engine."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams
    priority: int = 0  # lower first
    cache_salt: str = ""
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    arrival_time: float = 0.0  # Unix seconds; 0: when the engine receives it
    resumed_token_ids: Sequence[int] = ()  # output that another engine has generated


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position, of the model's own distribution."""

    token_id: int
    logprob: float
    rank: int  # 1: the likeliest
    top_token_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """What one step, or several merged ones, said of one request: tokens are deltas, counts are totals so far."""

    new_token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token that ended the output; None for an end of sequence token
    num_cached_tokens: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """An engine's load after a step."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0  # 0 to 1
    last_step_age: float = 0.0  # seconds since the step that runs now began; 0 between steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What an engine says of its model and limits."""

    model_name: str
    max_model_len: int
    vocab_size: int
    tokenizer_digest: str  # empty: the engine has no tokenizer
    block_hash_version: int
    max_num_seqs: int  # in one batch
    max_logprobs: int
    chain: HashChain
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """An engine's first word on a session."""

    instance_id: str
    model: ModelInfo
    stats: EngineStats
    num_cached_blocks: int  # that the prefix cache has room for; 0: the engine reuses no prefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """One session message: plain tokens as two columns, older than an entry of `outputs` for the same handle."""

    plain_handles: Sequence[int]
    plain_token_ids: Sequence[int]
    outputs: Sequence[tuple[int, EngineOutput]]  # with their handles
    stats: EngineStats | None


@dataclass(frozen=True, slots=True)
class Rejected:
    """An engine did not take a request. `code` is a gRPC status code's number."""

    handle: int
    code: int
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class Draining:
    """An engine admits nothing new."""


@dataclass(frozen=True, slots=True)
class KvEvents:
    """How an engine's prefix cache changed; `removed` comes before `stored`. A `snapshot` voids what came before."""

    sequence: int
    snapshot: bool
    stored: Sequence[bytes]
    removed: Sequence[bytes]


class KvEventsRefused(Exception):
    """An engine that tells nobody what its cache holds; says why."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A session message of a kind that this gateway does not know; it says nothing to it."""
