"""Messages of an engine about itself: model, start and end of a Session, prefix cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from proa.contract.audio import AudioInput
from proa.contract.outputs import SchedulerStats
from proa.contract.request import ImageInput, PoolingTask

MAX_MESSAGE_BYTES = 2**30
"""Of a message to an engine that reads images or prompt embeddings. 16 images of Qwen3-VL, of the largest size, are 768
MiB of pixels."""
MAX_TEXT_MESSAGE_BYTES = 2**26
"""Of one to another engine, and of all but pixels and embeddings in others: a prompt of 10 million tokens is 38
MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRule:
    """At which positions an engine makes checkpoints: parameters of `proa.blocks.checkpoint_positions`, in tokens."""

    interval: int
    min_junction: int


class Role(IntEnum):
    """What an engine is used for where prefill runs apart from decode."""

    BOTH = 0
    PREFILL = 1  # requests with `prefill_only`
    DECODE = 2  # requests whose prompts another engine computes, and short prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransfer:
    """How engines exchange blocks of the KV cache, as frames over TCP between their movers."""

    fingerprint: bytes  # of the cache's layout and types and of the weights; only equal ones exchange blocks
    ports: tuple[int, ...]  # of the movers, by rank, on the engine's host
    block_bytes: int  # of all ranks together


@dataclass(frozen=True, slots=True)
class SessionClaim:
    """What the conversations of a gateway want of an engine's cache, beside those of others."""

    num_blocks: int = 0  # that it retains, or is about to
    longest_wait: float = 0.0  # seconds for which a turn has been waiting for room; 0: none waits


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """An engine's model and limits, fixed once the model is loaded."""

    model_name: str
    model: str  # folder or hub id; with `revision` the root of the block hashes
    revision: str = ""
    max_model_len: int
    vocab_size: int
    block_size: int  # tokens
    num_gpu_blocks: int
    block_hash_version: int
    tokenizer_digest: str = ""  # empty: the engine has no tokenizer
    eos_token_ids: tuple[int, ...] = ()
    max_num_seqs: int  # in one step
    max_logprobs: int
    max_waiting_requests: int
    engine_version: str
    max_num_batched_tokens: int  # in one step
    prefix_caching: bool
    grammars: bool = False  # whether it accepts `SamplingParams.grammar`
    model_type: str = ""  # of config.json
    checkpoint_rule: CheckpointRule | None = None  # None: a cache hit may end at any block
    pooling_tasks: tuple[PoolingTask, ...] = ()  # that it accepts
    pooling_only: bool = False  # it generates no tokens
    embedding_size: int = 0  # values of an embedding; 0: it has none
    labels: tuple[str, ...] = ()  # of `PoolingTask.CLASSIFY`
    max_loras: int = 0  # different adapters in one step; 0: it accepts none
    images: ImageInput | None = None  # None: it reads none
    # tokens of an input to embed that callers may divide into requests, and average; 0: longer ones are errors
    max_embed_len: int = 0
    num_host_blocks: int = 0  # that host memory holds, beside the cache; 0: there is no host tier
    kv_transfer: KvTransfer | None = None  # how other engines fetch blocks from it; None: they cannot
    role: Role = Role.BOTH
    prompt_embeds_size: int = 0  # values of an embedding in a prompt; 0: it accepts none
    aliases: tuple[str, ...] = ()  # further names, beside `model_name`
    audios: AudioInput | None = None  # None: it reads none
    session_claims: bool = False  # it accepts `SessionClaim`


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """A loaded adapter."""

    name: str
    path: str
    digest: str  # SHA-256 of its content, in hexadecimal


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedLoras:
    """All adapters that requests may name, in the order of their names."""

    loras: tuple[Lora, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """An engine's first message in a Session."""

    instance_id: str  # drawn at each start of the engine
    model: ModelInfo
    stats: SchedulerStats
    loras: LoadedLoras | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The engine did not accept a request."""

    handle: int
    code: int  # number of a gRPC status code
    message: str
    retryable: bool  # another engine may accept it
    missing_images: Sequence[bytes] = ()  # hashes; it accepts the request with their pixels
    missing_audios: Sequence[bytes] = ()  # hashes; it accepts the request with their samples


@dataclass(frozen=True, slots=True)
class Draining:
    """The engine accepts no new requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEvents:
    """A change of an engine's prefix cache: apply what is removed before what is stored. A `snapshot` is all that it
    holds."""

    sequence: int  # one more than that of the message before
    snapshot: bool
    stored: Sequence[bytes]  # block hashes
    removed: Sequence[bytes]
    checkpoints_stored: Sequence[bytes] = ()  # hashes of the last blocks before them
    checkpoints_removed: Sequence[bytes] = ()
    host_snapshot: bool = False
    host_stored: Sequence[bytes] = ()  # the same of host memory
    host_removed: Sequence[bytes] = ()
    host_checkpoints_stored: Sequence[bytes] = ()
    host_checkpoints_removed: Sequence[bytes] = ()
