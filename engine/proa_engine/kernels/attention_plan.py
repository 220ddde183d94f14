"""Tiling of a step's batch for attention on a CPU: computed once a step, used by every layer.

It works on indices in NumPy, whose calls on small arrays take a third of the time of torch's. The sizes are explained
in `paged_attention_reference`.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from proa_engine.kernels.cache_layout import RowsView, rows_view

IntArray = npt.NDArray[np.int64]

CHUNK = 128  # tokens in one product of probabilities and values
LENGTH_MULTIPLE = 16
DECODE_TILE = 1 << 20  # numbers in a decode tile's keys (4 MB): measured best of 2^16 … 2^21 for 64 decodes


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """n requests with one query token each; their gathered tokens are padded to the same `length`."""

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
        """Of the query tokens start … end."""
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
    num_decodes: int,
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
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    num_queries = [min(starts[r + 1] - starts[r], seq_len) for r, seq_len in enumerate(lens)]
    if slot_mapping is not None:
        is_token = (slot_mapping >= 0).tolist()
        num_queries = [sum(is_token[start:end]) for start, end in itertools.pairwise(starts)]
    _, num_kv_heads, block_size, head_dim = cache_shape
    rows_per_block = num_kv_heads if block_stride is None else block_stride // (block_size * head_dim)
    planner = _Planner(starts, num_queries, lens, block_table.numpy(), cache_shape, rows_per_block, window, ends)
    decodes = tuple(planner.decodes(num_decodes))
    prefills = tuple(planner.prefills(num_decodes))
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


class _Planner:
    def __init__(
        self,
        starts: list[int],
        num_queries: list[int],
        seq_lens: list[int],
        block_table: npt.NDArray[np.int32],
        cache_shape: torch.Size,
        rows_per_block: int,
        window: int | None,
        ends: torch.Tensor | None,
    ) -> None:
        _, num_kv_heads, self.block_size, head_dim = cache_shape
        self.starts = starts
        self.num_queries = num_queries
        self.seq_lens = seq_lens
        self.block_table = block_table
        self.heads = np.arange(num_kv_heads)[:, None]
        self.rows_per_block = rows_per_block
        self.width = num_kv_heads * head_dim
        self.window = window
        self.ends = ends
        # The first token of each request that its query tokens attend to. Blocks before it may be another request's.
        self.visible = [0] * len(seq_lens)
        if window is not None:
            pairs = zip(seq_lens, num_queries, strict=True)
            self.visible = [max(0, seq_len - count - window + 1) for seq_len, count in pairs]
        # The first token to gather: a window's start is moved back to where chunk and block begin.
        is_aligned = CHUNK % self.block_size == 0
        self.firsts = [visible // CHUNK * CHUNK if is_aligned else 0 for visible in self.visible]
        self.num_tokens = [seq_len - first for seq_len, first in zip(seq_lens, self.firsts, strict=True)]

    def prefills(self, num_decodes: int) -> list[PrefillTile]:
        rows = range(num_decodes, len(self.seq_lens))
        return [self.prefill(r) for r in rows if self.num_queries[r]]

    def prefill(self, r: int) -> PrefillTile:
        length = self.padded(self.num_tokens[r])
        rows, _ = self.places([r], np.arange(0, length, self.block_size))
        end = self.starts[r + 1]
        start = end - self.num_queries[r]
        return PrefillTile(
            start=start,
            end=end,
            num_tokens=self.num_tokens[r],
            num_hidden=self.visible[r] - self.firsts[r],
            block_rows=torch.from_numpy(rows.ravel()),
            length=length,
            ends=None if self.ends is None else self.ends[start:end] - self.firsts[r],
        )

    def decodes(self, num_decodes: int) -> list[DecodeTile]:
        """Decodes by length, so that little is padding; a tile holds as many as stay in the caches."""
        rows = [r for r in range(num_decodes) if self.num_tokens[r]]  # the others are padding
        waiting = sorted(rows, key=self.num_tokens.__getitem__, reverse=True)
        tiles = []
        while waiting:
            length = self.padded(self.num_tokens[waiting[0]])
            most = max(1, DECODE_TILE // (length * self.width))
            # Requests half as long get a tile of their own, unless all are so short that the calls cost more.
            long_enough = 0 if length <= CHUNK else length // 2
            tile = [r for r in waiting[:most] if self.num_tokens[r] > long_enough]
            waiting = waiting[len(tile) :]
            tiles.append(self.decode(tile, length))
        return tiles

    def decode(self, requests: list[int], length: int) -> DecodeTile:
        """`requests` come longest first."""
        num_tokens = np.array([[self.num_tokens[r]] for r in requests])
        positions = np.arange(length)
        masked = positions >= num_tokens
        if self.window is not None:
            masked |= positions < num_tokens - self.window
        starts = [self.starts[r] for r in requests]
        is_whole = len(starts) == self.starts[-1] and starts == list(range(len(self.seq_lens)))
        rows, offsets = self.places(requests, positions)
        return DecodeTile(
            n=len(requests),
            tokens=None if is_whole else torch.tensor(starts),
            block_rows=torch.from_numpy(rows[:, :, :: self.block_size].ravel()),
            token_rows=torch.from_numpy((rows * self.block_size + offsets[:, None])[:, :, None]),
            masked=torch.from_numpy(masked[:, None, None]) if masked.any() else None,
            length=length,
        )

    def places(self, requests: list[int], positions: IntArray) -> tuple[IntArray, IntArray]:
        """Where the requests' gathered tokens at these positions lie: rows of blocks [n, kv_heads, positions], and
        offsets in them [n, positions]. Behind a request's end it is its last token's place, before its window the first
        visible token's."""
        first = np.array([[self.firsts[r]] for r in requests])
        last = np.array([[self.seq_lens[r] - 1] for r in requests])
        positions = np.minimum(positions + first, last)
        if self.window is not None:
            positions = np.maximum(positions, np.array([[self.visible[r]] for r in requests]))
        columns, offsets = np.divmod(positions, self.block_size)
        blocks = self.block_table[np.array(requests)[:, None], columns].astype(np.int64)
        return (blocks * self.rows_per_block)[:, None] + self.heads, offsets

    def padded(self, num_tokens: int) -> int:
        return _round_up(num_tokens, math.lcm(LENGTH_MULTIPLE, self.block_size))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
