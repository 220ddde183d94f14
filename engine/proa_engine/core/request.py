"""Request: the state of one output sequence in the core."""

import sys
from collections.abc import Sequence
from enum import IntEnum

from proa.contract import EngineCoreRequest, Event, EventType, FinishReason, KvFetch, KvLoad, extra_keys
from proa_engine.core.lora_slots import NO_ADAPTER, Adapter, NoAdapter
from proa_engine.core.request_media import NO_MEDIA, RequestMedia
from proa_engine.core.types import Block, PooledRows, RowOutput

CACHES_NOTHING = sys.maxsize  # value of `num_cached_blocks`: blocks of this request are not cached
NEVER_DRAFTED = sys.maxsize  # value of `drafted_from`


class RequestStatus(IntEnum):
    """Ordered: all values after PREEMPTED mean finished."""

    WAITING_FOR_GRAMMAR = 1  # to be compiled
    WAITING_FOR_FETCH = 2  # of blocks from another engine
    WAITING = 3
    RUNNING = 4
    PREEMPTED = 5  # waiting to be computed again
    FINISHED_STOPPED = 6
    FINISHED_COMPLETE = 7
    FINISHED_LENGTH_CAPPED = 8
    FINISHED_ABORTED = 9
    FINISHED_ERROR = 10
    FINISHED_REPETITION = 11


PENDING = (RequestStatus.WAITING_FOR_GRAMMAR, RequestStatus.WAITING_FOR_FETCH)
FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_COMPLETE: FinishReason.COMPLETE,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
}


_RUNNING = RequestStatus.RUNNING  # looking up an enum's member takes longer than all of `append_plain_token`


class Request:
    """A request from its arrival to its end.

    `token_ids` are the tokens that the host knows. Steps in flight sample more, which only the device knows yet;
    `num_planned_tokens` counts both. `num_computed_tokens` counts the tokens of all scheduled steps, finished or not.
    """

    __slots__ = (
        "block_hashes",
        "checkpoints",
        "client_index",
        "disk_read",
        "drafted_from",
        "encoded",
        "ends",
        "eos_token_ids",
        "error",
        "events",
        "extra_keys",
        "fetch",
        "first_columns",
        "has_cache_salt",
        "has_output",
        "load",
        "lora",
        "max_num_tokens",
        "media",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_planned_tokens",
        "num_prompt_logprobs_sent",
        "num_prompt_tokens",
        "num_slots",
        "order",
        "owner",
        "pooling_params",
        "prompt_embeds",
        "reads_prefix_cache",
        "request_id",
        "sampling_params",
        "states",
        "states_read",
        "status",
        "stop_reason",
        "tables",
        "token_ids",
        "trace_headers",
    )

    def __init__(
        self, request: EngineCoreRequest, *, order: tuple[int, ...], max_num_tokens: int, eos_token_ids: frozenset[int]
    ) -> None:
        params = request.sampling_params
        self.request_id = request.request_id
        self.client_index = request.client_index
        self.owner = request.client_index if request.retain else 0  # of its blocks, see `BlockPool`; 0: nobody
        self.sampling_params = params
        self.pooling_params = request.pooling_params
        # What its blocks' hashes depend on, beside their tokens.
        self.extra_keys = extra_keys(request.cache_salt, request.lora_name, request.lora_digest, request.audios)
        self.has_cache_salt = bool(request.cache_salt)
        self.lora: Adapter | NoAdapter = NO_ADAPTER
        self.media: RequestMedia = NO_MEDIA
        self.prompt_embeds = request.prompt_embeds  # hashed; kept until it ends, as it may be preempted
        self.trace_headers = request.trace_headers
        self.order = order  # unique; lower is scheduled first and preempted last
        self.status = RequestStatus.WAITING
        self.token_ids = [*request.prompt_token_ids, *request.resumed_token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_num_tokens = max_num_tokens  # prompt and output together

        stop_token_ids = frozenset(params.stop_token_ids)
        self.eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids - stop_token_ids
        self.ends = stop_token_ids | self.eos_token_ids
        self.stop_reason: int | None = None
        self.error = ""  # why it finished with FINISHED_ERROR, as a sentence for the user

        self.num_computed_tokens = 0
        self.num_planned_tokens = len(self.token_ids)
        # Log probabilities of the prompt need every token to be computed.
        self.reads_prefix_cache = params.prompt_logprobs is None
        self.num_cached_tokens = 0  # cached tokens when it was first scheduled
        self.fetch: KvFetch | None = None  # from another engine
        self.disk_read: KvFetch | None = None
        self.load: KvLoad | None = None  # its last load from host memory
        self.num_prompt_logprobs_sent = 0

        # The blocks and slots that it holds while it runs. In `tables`, columns before a window's first one are None.
        self.tables: list[list[Block | None]] = []
        self.first_columns: list[int] = []  # first column that has a block, in each table with a window
        self.encoded: Sequence[Block] = ()  # with what cross-attention reads of its audio; empty without
        self.states: Sequence[Block] = ()  # the slot that its steps write; empty without recurrent layers
        self.states_read: Sequence[Block] = ()  # a cached slot that its first step reads instead
        # First token of its first row with drafts since it started. The slot has the states of the tokens before a row
        # up to this one; of later rows only the workers know which states it has.
        self.drafted_from = NEVER_DRAFTED
        self.checkpoints: tuple[int, ...] = ()  # positions, see `proa.blocks.checkpoint_positions`
        self.num_slots = 0  # tokens that can be computed before more slots must be allocated
        self.block_hashes: list[bytes] = []  # of full blocks of known tokens, computed on demand
        self.num_cached_blocks = 0  # blocks of table 0 whose content is in the prefix cache

        self.events: list[Event] = []  # not sent yet
        self.has_output = False

    @property
    def num_tokens(self) -> int:
        """Tokens known to the host."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known to the host, resumed ones included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_placeholders(self) -> int:
        """Tokens that steps in flight sample."""
        return self.num_planned_tokens - len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that the next step may compute. The last token of the output is never computed: none follows it."""
        return min(self.num_planned_tokens, self.max_num_tokens - 1) - self.num_computed_tokens

    @property
    def unsent_token_ids(self) -> Sequence[int]:
        """Known tokens that follow the computed ones and that the workers lack or have other tokens for."""
        return ()

    def fits(self, budget: int) -> bool:
        """Whether a step with a budget of `budget` tokens can start the request."""
        return True

    @property
    def num_slots_to_start(self) -> int:
        """Number of tokens for which slots are allocated when a waiting request is scheduled."""
        return len(self.token_ids)

    @property
    def max_placeholders(self) -> int:
        """Upper bound of `num_placeholders`, with two steps in flight."""
        return 2

    @property
    def is_finished(self) -> bool:
        return self.status > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        return FINISH_REASONS.get(self.status)

    @property
    def pooled(self) -> PooledRows | None:
        """The complete result of a finished pooled request; None for others."""
        return None

    def record(self, event: EventType, timestamp: float) -> None:
        self.events.append(Event(event, timestamp))

    def schedule(self, num_tokens: int) -> None:
        """Record that the next step computes `num_tokens` tokens, and that it samples one if it computes the last known
        token."""
        self.num_computed_tokens += num_tokens
        self.num_planned_tokens = max(self.num_planned_tokens, self.num_computed_tokens + 1)

    def schedule_decode(self) -> bool:
        """Call `schedule(1)` if one token is left to compute and it needs no new slot. Returns whether it did."""
        position = self.num_computed_tokens
        if (
            position + 1 != self.num_planned_tokens
            or position == self.num_slots
            or position + 1 == self.max_num_tokens  # the output's last token
        ):
            return False
        self.num_computed_tokens = position + 1
        self.num_planned_tokens = position + 2
        return True

    def append_plain_token(self, token_id: int) -> bool:
        """Append a token if the client needs nothing but the token: it is neither the first nor the last, and has no
        event.

        Returns whether it was appended; otherwise call `append_row`.
        """
        if (
            self.status is not _RUNNING
            or token_id in self.ends
            or len(self.token_ids) + 1 >= self.max_num_tokens
            or self.events
            or not self.has_output
        ):
            return False
        self.token_ids.append(token_id)
        return True

    def append_row(self, row: RowOutput, now: float) -> Sequence[int]:
        """Append the result of the oldest step in flight, up to the token that finishes the request. Returns all tokens
        added, forced ones included."""
        num_before = len(self.token_ids)
        for token_id in row.sampled_token_ids:
            if self.append_token(token_id):
                break
        new_ids = self.token_ids[num_before:]
        if new_ids and not self.has_output:
            self.has_output = True
            self.record(EventType.FIRST_TOKEN, now)
        return new_ids

    def append_token(self, token_id: int) -> bool:
        """Append the oldest of the tokens in flight. Returns whether the request has finished."""
        assert self.num_placeholders > 0, f"a token of {self.request_id!r} was never scheduled"
        self.token_ids.append(token_id)
        if token_id in self.ends and self.num_output_tokens >= self.sampling_params.min_tokens:
            self.status = RequestStatus.FINISHED_STOPPED
            self.stop_reason = None if token_id in self.eos_token_ids else token_id
            return True
        if len(self.token_ids) >= self.max_num_tokens:
            self.status = RequestStatus.FINISHED_LENGTH_CAPPED
            return True
        return False
