"""Tiling of a step's batch for attention on a CPU: computed once a step, used by every layer.

It works on indices in NumPy, whose calls on small arrays take a third of the time of torch's. The sizes are explained
in `paged_attention_reference`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from proa_engine.kernels.attention.store_kv import RowsView, rows_view

IntArray = npt.NDArray[np.int64]

CHUNK = 128  # tokens in one product of probabilities and values
LENGTH_MULTIPLE = 16
DECODE_TILE = 1 << 20  # numbers in a decode tile's keys (4 MB): measured best of 2^16 … 2^21 for 64 decodes
SHORT_CHUNK = 1 << 17  # numbers in keys that are gathered in the time that the calls for a prefill tile take


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """n query tokens, each with gathered tokens of its own, padded to the same `length`."""

    n: int
    tokens: torch.Tensor | None  # [n] int64: rows of the query; None: the tile is the whole batch in its order
    block_rows: torch.Tensor  # [n * kv_heads * length / block_size] int64: rows of the plan's `blocks`
    # [n, kv_heads, 1, length] int64: each token's row of the plan's `tokens`; behind a request's end that of its last
    # token, and before a window that of its first, so that no stale value is read.
    token_rows: torch.Tensor
    masked: torch.Tensor | None  # [n, 1, 1, length] bool; None: nothing is masked
    length: int


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """The query tokens start … end of one request: the last of its `num_tokens` gathered tokens.

    No query token attends to the first `num_hidden` of these, which are before the first one's window.
    """

    start: int
    end: int
    num_tokens: int
    num_hidden: int
    block_rows: torch.Tensor  # [kv_heads * length / block_size] int64, as above
    length: int
    # [end - start] int32: the end of the gathered tokens that each query token attends to; None: it is the last one.
    ends: torch.Tensor | None

    def ends_of(self, start: int, end: int) -> torch.Tensor | None:
        """Return `ends` of the query tokens start … end - 1."""
        return None if self.ends is None else self.ends[start - self.start : end - self.start]

    def columns(
        self, position: int, num_queries: int, window: int | None, ends: torch.Tensor | None
    ) -> tuple[int, int]:
        """The gathered tokens that `num_queries` queries from `position` on, with these `ends`, can see, cut where bits
        stay the same."""
        first = 0 if window is None else max(0, position - window + 1) // CHUNK * CHUNK
        last = position + num_queries if ends is None else int(ends.max())
        return first, _round_up(min(last, self.num_tokens), LENGTH_MULTIPLE)


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """The tiles of a step's batch for layers with the same window (in tokens, the query itself included; None: no
    window) and layout of the cache."""

    decodes: tuple[DecodeTile, ...]
    prefills: tuple[PrefillTile, ...]
    window: int | None
    blocks: RowsView  # of a cache, rows of block_size * D
    tokens: RowsView  # of a cache, rows of D
    # float32 workspace for the largest tile's gathered tokens, reused because fresh memory costs page faults.
    keys: torch.Tensor
    values: torch.Tensor  # gathered by prefills only


def plan_reference(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    cache_shape: torch.Size,
    window: int | None,
    slot_mapping: torch.Tensor | None = None,
    block_stride: int | None = None,
    ends: torch.Tensor | None = None,
) -> ReferencePlan:
    """Cut a batch into tiles. `cache_shape` is the shape of the key cache: [num_blocks, kv_heads, block_size, D].

    A request's query tokens before its beginning are padding, as are, if `slot_mapping` is given, those with slot -1.
    `block_stride`, a multiple of block_size * D: elements from one block to the next; None: the cache is contiguous.
    `ends` [T] int32: the end of the tokens that each token attends to, of its own request; None: it is the last.
    """
    starts, lens = query_start_loc.numpy().astype(np.int64), seq_lens.numpy().astype(np.int64)
    num_queries = np.minimum(np.diff(starts), lens)
    if slot_mapping is not None:
        tokens_before = np.concatenate(([0], (slot_mapping.numpy() >= 0).cumsum()))
        num_queries = np.diff(tokens_before[starts])
    _, num_kv_heads, block_size, head_dim = cache_shape
    spans = _Spans(np.arange(len(lens)), starts[1:], num_queries, lens)
    alone, together = spans.split(num_kv_heads * head_dim, None if ends is None else ends.numpy())
    rows_per_block = num_kv_heads if block_stride is None else block_stride // (block_size * head_dim)
    planner = _Planner(block_table.numpy(), cache_shape, rows_per_block, window)
    decodes = tuple(planner.decodes(alone, int(starts[-1])))
    prefills = tuple(planner.prefills(together, ends))
    num_values = max((tile.length for tile in prefills), default=0)
    num_keys = max([tile.n * tile.length for tile in decodes], default=num_values)
    keys, values = (torch.empty(n * num_kv_heads * head_dim) for n in (max(num_keys, num_values), num_values))
    return ReferencePlan(
        decodes,
        prefills,
        window,
        blocks=rows_view(cache_shape, block_stride, block_size * head_dim),
        tokens=rows_view(cache_shape, block_stride, head_dim),
        keys=keys,
        values=values,
    )


@dataclass(frozen=True, slots=True)
class _Spans:
    """Columns of consecutive query tokens of a request: `num_queries` before the token `ends` of the batch, the last of
    the request's first `seq_lens` tokens."""

    requests: IntArray  # rows of the block table
    ends: IntArray
    num_queries: IntArray
    seq_lens: IntArray

    def __getitem__(self, index: slice | npt.NDArray[Any]) -> "_Spans":
        return _Spans(self.requests[index], self.ends[index], self.num_queries[index], self.seq_lens[index])

    def split(self, width: int, ends: npt.NDArray[np.int32] | None) -> "tuple[_Spans, _Spans]":
        """The spans whose tokens are computed alone, one span for each token, and the others. Without empty spans.

        Short spans are computed token by token, because a tile of many tokens takes less time than many tiles.
        `width`: numbers in a token's keys. `ends` are those of `plan_reference`.
        """
        is_alone = (self.num_queries - 2) * self.seq_lens * width <= SHORT_CHUNK
        if ends is not None:
            is_alone &= self._are_causal(ends)
        alone, together = self[is_alone], self[~is_alone]
        behind = np.repeat(alone.num_queries.cumsum(), alone.num_queries)  # index of the span's end among all tokens
        before_end = behind - 1 - np.arange(len(behind))  # tokens of the span behind each token
        tokens = alone[np.repeat(np.arange(len(alone.requests)), alone.num_queries)]
        ones = np.ones_like(tokens.requests)
        return _Spans(tokens.requests, tokens.ends - before_end, ones, tokens.seq_lens - before_end), together

    def _are_causal(self, ends: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Return for each span whether its tokens attend to nothing behind themselves."""
        spans = zip(self.ends.tolist(), self.num_queries.tolist(), self.seq_lens.tolist(), strict=True)
        return np.array(
            [bool((ends[end - n : end] == np.arange(seq_len - n, seq_len) + 1).all()) for end, n, seq_len in spans]
        )


class _Planner:
    def __init__(
        self, block_table: npt.NDArray[np.int32], cache_shape: torch.Size, rows_per_block: int, window: int | None
    ) -> None:
        _, num_kv_heads, self.block_size, head_dim = cache_shape
        self.block_table = block_table
        self.heads = np.arange(num_kv_heads)[:, None]
        self.rows_per_block = rows_per_block
        self.width = num_kv_heads * head_dim
        self.window = window

    def prefills(self, spans: _Spans, ends: torch.Tensor | None) -> list[PrefillTile]:
        return [self.prefill(spans[index : index + 1], ends) for index in range(len(spans.requests))]

    def prefill(self, span: _Spans, ends: torch.Tensor | None) -> PrefillTile:
        """`span`: one."""
        visible, firsts = self.bounds(span)
        first, end, num_tokens = int(firsts[0]), int(span.ends[0]), int((span.seq_lens - firsts)[0])
        start = end - int(span.num_queries[0])
        length = self.padded(num_tokens)
        rows, _ = self.places(span, np.arange(0, length, self.block_size))
        return PrefillTile(
            start=start,
            end=end,
            num_tokens=num_tokens,
            num_hidden=int(visible[0]) - first,
            block_rows=torch.from_numpy(rows.ravel()),
            length=length,
            ends=None if ends is None else ends[start:end] - first,
        )

    def decodes(self, spans: _Spans, batch_size: int) -> Iterator[DecodeTile]:
        """Spans of one token by length, so that little is padding; a tile holds as many as stay in the caches."""
        num_tokens = spans.seq_lens - self.bounds(spans)[1]
        order = np.argsort(-num_tokens, kind="stable")
        waiting, num_tokens = spans[order], num_tokens[order]
        while len(num_tokens):
            length = self.padded(int(num_tokens[0]))
            most = max(1, DECODE_TILE // (length * self.width))
            # Requests half as long get a tile of their own, unless all are so short that the calls cost more.
            long_enough = 0 if length <= CHUNK else length // 2
            n = int((num_tokens[:most] > long_enough).sum())
            yield self.decode(waiting[:n], length, batch_size)
            waiting, num_tokens = waiting[n:], num_tokens[n:]

    def decode(self, spans: _Spans, length: int, batch_size: int) -> DecodeTile:
        num_tokens = (spans.seq_lens - self.bounds(spans)[1])[:, None]
        positions = np.arange(length)
        masked = positions >= num_tokens
        if self.window is not None:
            masked |= positions < num_tokens - self.window
        tokens = spans.ends - 1
        is_whole = len(tokens) == batch_size and bool((tokens == np.arange(batch_size)).all())
        rows, offsets = self.places(spans, positions)
        return DecodeTile(
            n=len(tokens),
            tokens=None if is_whole else torch.from_numpy(tokens),
            block_rows=torch.from_numpy(rows[:, :, :: self.block_size].ravel()),
            token_rows=torch.from_numpy((rows * self.block_size + offsets[:, None])[:, :, None]),
            masked=torch.from_numpy(masked[:, None, None]) if masked.any() else None,
            length=length,
        )

    def places(self, spans: _Spans, positions: IntArray) -> tuple[IntArray, IntArray]:
        """Where the spans' gathered tokens at these positions lie: rows of blocks [n, kv_heads, positions], and
        offsets in them [n, positions]. Behind a span's end it is its last token's place, before its window the first
        visible token's."""
        visible, firsts = self.bounds(spans)
        positions = np.minimum(positions + firsts[:, None], spans.seq_lens[:, None] - 1)
        if self.window is not None:
            positions = np.maximum(positions, visible[:, None])
        columns, offsets = np.divmod(positions, self.block_size)
        blocks = self.block_table[spans.requests[:, None], columns].astype(np.int64)
        return (blocks * self.rows_per_block)[:, None] + self.heads, offsets

    def bounds(self, spans: _Spans) -> tuple[IntArray, IntArray]:
        """The first token that each span's query tokens attend to, and the first to gather. Blocks before the former
        may be another request's; a window's start is moved back to where chunk and block begin."""
        if self.window is None:
            return (zeros := np.zeros_like(spans.seq_lens)), zeros
        visible = np.maximum(0, spans.seq_lens - spans.num_queries - self.window + 1)
        is_aligned = CHUNK % self.block_size == 0
        return visible, visible // CHUNK * CHUNK if is_aligned else np.zeros_like(visible)

    def padded(self, num_tokens: int) -> int:
        return _round_up(num_tokens, math.lcm(LENGTH_MULTIPLE, self.block_size))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
