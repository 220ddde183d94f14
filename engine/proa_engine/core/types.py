"""Types that the core exchanges with the executor and the engine's front ends. They are never sent to clients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from proa.contract import (
    EngineCoreOutput,
    KvFetch,
    LoadedLoras,
    PoolingParams,
    PromptEmbeds,
    SamplingParams,
    TokenLogprobs,
)
from proa_engine.core.kv_events import KvEventBatch

RejectionCode = Literal[
    "resource_exhausted", "invalid_argument", "already_exists", "unavailable", "not_found", "failed_precondition"
]
NO_LORA = -1  # instead of an adapter's slot
EMPTY_LORA = 0  # id of an adapter that adds nothing, which is always loaded
NO_STATE = -1  # instead of a state's slot: nothing is read (the state is zero), or nothing is written


class Block:
    """One block of the KV cache, used by `ref_count` requests. Free blocks are linked through `prev` and `next`,
    others link to themselves.

    A cached block can be found in the prefix cache: `cached_in[block_hash]` is this block, also while it is free. Those
    of an encoded audio can be found together in `EncoderBlocks.cached`. The slots of recurrent states are `Block`s too,
    of another pool.
    """

    __slots__ = ("block_hash", "block_id", "cached_in", "checkpoints", "next", "owners", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash = b""
        # the cached blocks of its table, or the encoded audios; None: it is not cached
        self.cached_in: dict[bytes, Block] | dict[bytes, list[Block]] | None = None
        self.checkpoints: set[bytes] | None = None  # hashes of the checkpoints that need it, while it is cached
        self.owners: tuple[int, ...] = ()  # streams whose sessions retain it, see `BlockPool`
        self.prev = self.next = self


@dataclass(frozen=True, slots=True)
class Rejection:
    """A submitted request that the core did not accept. It gets no outputs."""

    request_id: str
    client_index: int
    code: RejectionCode
    message: str  # a sentence for the user
    missing_images: Sequence[bytes] = ()  # hashes, with the code "failed_precondition"
    missing_audios: Sequence[bytes] = ()  # likewise


class PlainTokens(NamedTuple):
    """Outputs of one token and nothing else. `request_ids` is the same object as in the step before if the requests are
    the same."""

    request_ids: Sequence[str] = ()
    token_ids: Sequence[int] = ()  # one for each of `request_ids`


# Read-only by convention: freezing a dataclass triples the cost of making one, and each step makes these.


@dataclass(slots=True)
class StepOutputs:
    """One step's results for all clients."""

    outputs: list[EngineCoreOutput]
    timestamp: float  # Unix seconds, when the step ended
    step: int
    plain: PlainTokens = field(default_factory=PlainTokens)  # the outputs of other requests than those in `outputs`
    rejections: Sequence[Rejection] = ()
    kv_events: KvEventBatch | None = None  # set only while there are subscribers
    loras: LoadedLoras | None = None  # set when the loaded adapters have changed
    sleep_level: int = 0


class LoraSlot(NamedTuple):
    """The adapter of a request and the slot that it is applied from. The workers fill the slot before this step."""

    lora_id: int
    slot: int


BASE_MODEL = LoraSlot(EMPTY_LORA, NO_LORA)  # of a request without an adapter


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Where an image or an audio stands in a request's tokens."""

    hash: bytes
    offset: int
    num_tokens: int
    shape: tuple[int, ...]  # as in `EncoderInput`


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """An image or an audio that a step encodes."""

    hash: bytes
    shape: tuple[int, ...]  # height, width and 3 of an image, in pixels; the number of samples of an audio
    data: bytes  # uint8 RGB, row by row; little-endian float32


@dataclass(frozen=True, slots=True)
class CrossInput:
    """An audio that a step encodes into blocks, for cross-attention."""

    block_ids: list[int]
    num_tokens: int  # of the encoder's output
    samples: bytes  # little-endian float32


@dataclass(frozen=True, slots=True)
class EncodedAudio:
    """What cross-attention layers read of a request's audio."""

    block_ids: tuple[int, ...]
    num_tokens: int


NO_AUDIO = EncodedAudio((), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequestData:
    """A scheduled request that the workers do not hold: a new one, or one resumed after preemption."""

    request_id: str
    token_ids: list[int]  # all tokens known to the host: prompt, then output so far
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[list[int]]  # by table
    sampling_params: SamplingParams
    lora: LoraSlot = BASE_MODEL
    pooling_params: PoolingParams | None = None  # if set, no step samples a token for the request
    trace_headers: Mapping[str, str] = field(default_factory=dict)  # set only for sampled traces
    media: Sequence[MediaSpan] = ()  # by ascending offset, also those that no step computes any more
    prompt_embeds: Sequence[PromptEmbeds] = ()  # by ascending offset, of tokens that are not computed
    audio: EncodedAudio = NO_AUDIO  # that every token reads by cross-attention


@dataclass(frozen=True, slots=True)
class CachedRequestData:
    """Changes of a scheduled request that the workers hold. They have its tokens already, sampled ones included."""

    request_id: str
    num_computed_tokens: int  # before this step
    new_block_ids: Sequence[Sequence[int]]  # by table, each behind those that it has; empty if no table has any
    # From position `num_computed_tokens` on, all that the host knows; empty if the workers have them already.
    new_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class StateSteps:
    """Where a row's recurrent state is read and written.

    A row without `StateSteps` reads and writes the slot that it wrote last.
    """

    read: int  # slot; NO_STATE: the row begins at position 0
    # Position (tokens before it) and slot of each state that is written, in order; the last one is the chunk's end.
    writes: tuple[tuple[int, int], ...]


NO_STATES: Mapping[str, StateSteps] = {}


class StoredCheckpoint(NamedTuple):
    """A checkpoint in host memory, at the end of the block `block_hash`."""

    block_hash: bytes
    tails: list[list[tuple[int, bytes]]]  # page and hash of its blocks in each table with a window, in order
    state: int  # slot; NO_STATE: the model has none


@dataclass(slots=True)
class Copies:
    """The copies of a step between the device's blocks and slots and the host's pages and slots, as (source, target).

    The copies of a step run at any time between the end of the step before it and the start of the step after it.
    """

    serial: int = 0  # steps with copies since the start, this one included

    stores: list[tuple[int, int]] = field(default_factory=list)  # block and page
    loads: list[tuple[int, int]] = field(default_factory=list)  # page and block
    state_stores: list[tuple[int, int]] = field(default_factory=list)  # slots
    state_loads: list[tuple[int, int]] = field(default_factory=list)
    # What the mover is told of the stores; empty without one.
    stored_blocks: list[tuple[int, bytes]] = field(default_factory=list)  # page and hash of blocks of table 0
    stored_checkpoints: list[StoredCheckpoint] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.stores or self.loads or self.state_stores or self.state_loads)


NO_COPIES = Copies()


@dataclass(slots=True, kw_only=True)
class SchedulerOutput:
    """One step, as the core schedules it and the executor sends it to every worker.

    A request samples a token in this step if and only if the step computes the last of its tokens, counting sampled
    ones that the host does not know yet; a pooled request never does. Tokens scheduled beyond that last one are drafts
    to verify; such a request's `num_computed_tokens` is an upper bound, and only the workers know the exact number. A
    step without tokens has no rows and no forward pass; it only carries finished and preempted ids, and copies.

    The batch's rows are `decode_request_ids`, then `num_chunk_tokens`. The list of decodes is the same object as in the
    step before if the decodes are the same.
    """

    step: int
    new_requests: list[NewRequestData]
    cached_requests: list[CachedRequestData]  # others continue from what the workers have computed
    decode_request_ids: list[str]  # rows of one token
    num_chunk_tokens: dict[str, int]  # rows of several tokens, by request id
    finished_request_ids: list[str]  # workers drop these before they run this step
    preempted_request_ids: list[str]  # likewise; they come back as new requests
    num_drafted_rows: int = 0  # of `num_chunk_tokens`, the first ones: those with drafts
    # Indices of rows that sample a token under a grammar, ascending; rank 0 alone samples all rows of such a step.
    grammar_rows: list[int] = field(default_factory=list)
    # By request id; empty without recurrent layers.
    states: Mapping[str, StateSteps] = field(default_factory=lambda: NO_STATES)
    # Before the forward pass the workers forget what they have encoded of `freed_media`, then encode `encoder_inputs`.
    # They then have every image and audio that the step's tokens touch. One that is encoded again may be in both.
    freed_media: list[bytes] = field(default_factory=list)  # hashes
    encoder_inputs: list[EncoderInput] = field(default_factory=list)
    cross_inputs: list[CrossInput] = field(default_factory=list)  # likewise encoded before the forward pass
    copies: Copies = field(default_factory=lambda: NO_COPIES)

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """Number of scheduled tokens by request id, in the order of the rows."""
        return dict.fromkeys(self.decode_request_ids, 1) | self.num_chunk_tokens

    @property
    def total_num_scheduled_tokens(self) -> int:
        return len(self.decode_request_ids) + sum(self.num_chunk_tokens.values())

    @property
    def is_empty(self) -> bool:
        return not (self.decode_request_ids or self.num_chunk_tokens)

    @property
    def must_run(self) -> bool:
        """Whether workers have anything to do, including dropping requests and copying pages."""
        return not self.is_empty or bool(self.finished_request_ids or self.preempted_request_ids or self.copies)


@dataclass(frozen=True, slots=True)
class HostOccupancy:
    """The host tier's current content, and the number of copies since the start."""

    num_pages: int
    num_cached_pages: int  # in the prefix cache
    num_stored_pages: int
    num_loaded_pages: int
    num_loaded_tokens: int
    num_skipped_stores: int  # blocks that were not stored: the queue was full, or no page was free
    page_bytes: int  # on one rank


@dataclass(frozen=True, slots=True)
class FetchCounts:
    """Fetches from other engines, or from disk, since the start."""

    num_fetches: int = 0  # that ended
    num_failed_fetches: int = 0  # of these, those that ended with an error
    num_fetched_tokens: int = 0
    num_fetched_bytes: int = 0  # of all ranks
    seconds: float = 0.0  # from the begin to the end of each

    def plus(self, ended: KvFetch) -> "FetchCounts":
        """Return these counts with one more fetch."""
        return FetchCounts(
            self.num_fetches + 1,
            self.num_failed_fetches + bool(ended.error),
            self.num_fetched_tokens + ended.num_tokens,
            self.num_fetched_bytes + ended.num_bytes,
            self.seconds + ended.ended - ended.started,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCounts:
    """The size of what is on disk, and what happened since the movers started. Of all ranks together."""

    num_bytes: int = 0
    max_bytes: int = 0
    num_written_bytes: int = 0
    num_read_bytes: int = 0
    num_skipped: int = 0  # blocks and checkpoints that were not written as the core asked
    num_damaged: int = 0  # units whose content was not what was written
    num_errors: int = 0  # times that writing stopped


@dataclass(frozen=True, slots=True)
class DiskOccupancy:
    """The disk's current content as the core knows it, and its reads since the start."""

    num_blocks: int
    counts: DiskCounts
    reads: FetchCounts


@dataclass(frozen=True, slots=True)
class CacheOccupancy:
    """The cache's current content. Cached blocks may also be in use."""

    cached_blocks: tuple[int, ...] = ()  # in the prefix cache, by table
    num_checkpoints: int = 0
    # A slot is in use, cached for a checkpoint, or free; all are zero without recurrent layers.
    num_used_states: int = 0
    num_cached_states: int = 0
    num_free_states: int = 0
    host: HostOccupancy | None = None
    fetches: FetchCounts | None = None  # None: nothing is fetched from other engines
    disk: DiskOccupancy | None = None


class PooledRows(NamedTuple):
    """Rows of a pooled request's result, computed by one step."""

    first: int  # the number of rows before them
    num_rows: int
    values: bytes  # little-endian float32, row by row


class Drafts(NamedTuple):
    """A request's draft tokens in one step."""

    planned: int  # number of tokens that the scheduler made room for
    proposed: int  # number of tokens that the drafter proposed
    matches: Sequence[int] = ()  # by way to draw: 1 if it would have proposed the first sampled token


@dataclass(slots=True)
class RowOutput:
    """A row's result, unless it is exactly one sampled token."""

    sampled_token_ids: Sequence[int] = ()  # accepted drafts, then the sampled token; empty if known tokens are left
    drafts: Drafts | None = None  # None: no drafts were planned
    logprobs: Sequence[TokenLogprobs] = ()  # one per sampled token
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # of this step's prompt tokens
    prompt_logprobs_end: int = 0  # of the prompt's, those of the steps before included
    pooled: PooledRows | None = None  # of a pooled request, which has no sampled tokens


@dataclass(slots=True, kw_only=True)
class ModelRunnerOutput:
    """One step's result on the host."""

    plain_token_ids: list[int]  # the sampled token of each row that has nothing else, in their order
    others: dict[str, RowOutput] = field(default_factory=dict)  # by request id
