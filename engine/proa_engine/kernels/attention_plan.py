"""How the CPU's attention cuts a step's batch into tiles: made once a step, used by every layer. Lists and index
tensors only; the arithmetic is in `paged_attention_reference`, which also says where these sizes come from.
"""

import math
from dataclasses import dataclass

import torch

CHUNK = 128  # tokens in one product of probabilities and values
LENGTH_MULTIPLE = 16
DECODE_TILE = 1 << 20  # numbers in a decode tile's keys: they stay in the caches


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """n requests with one query token each, their gathered tokens padded to one `length`."""

    tokens: torch.Tensor  # [n] int64: rows of the query
    block_rows: torch.Tensor  # [n * kv_heads * length / block_size] int64: rows of the cache as [blocks * kv_heads, …]
    masked: torch.Tensor  # [n, 1, length] bool
    stale_rows: torch.Tensor  # int64: rows of the gathered values [n * kv_heads * length, D] behind a request's end
    length: int


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """One request with query tokens start … end, the last of its `num_tokens` gathered ones."""

    start: int
    end: int
    num_tokens: int
    block_rows: torch.Tensor  # [kv_heads * length / block_size] int64, as above

    def columns(self, position: int, num_queries: int, window: int | None) -> slice:
        """The gathered tokens that `num_queries` queries from `position` on can see, cut where bits stay the same."""
        first = 0 if window is None else max(0, position - window + 1) // CHUNK * CHUNK
        return slice(first, _round_up(min(position + num_queries, self.num_tokens), LENGTH_MULTIPLE))


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """A step's batch in tiles, for layers that look `window` tokens back (the token itself counts; None: all)."""

    decodes: tuple[DecodeTile, ...]
    prefills: tuple[PrefillTile, ...]
    window: int | None


@dataclass(frozen=True, slots=True)
class _Planner:
    seq_lens: list[int]
    block_table: torch.Tensor  # int64
    block_size: int
    num_kv_heads: int
    head_dim: int
    window: int | None

    def first(self, request: int, num_queries: int) -> int:
        """The first token to gather. A window's start is moved back to where a chunk and a block begin."""
        if self.window is None or CHUNK % self.block_size:
            return 0
        return max(0, self.seq_lens[request] - num_queries - self.window + 1) // CHUNK * CHUNK

    def padded(self, num_tokens: int) -> int:
        return _round_up(num_tokens, math.lcm(LENGTH_MULTIPLE, self.block_size))

    def block_rows(self, requests: list[int], firsts: list[int], length: int) -> torch.Tensor:
        """Places of the blocks of each request's `length` tokens from `first` on; behind its end, its own last one."""
        steps = torch.arange(length // self.block_size)
        last = torch.tensor([(self.seq_lens[r] - 1) // self.block_size for r in requests])
        columns = torch.minimum(steps + torch.tensor(firsts)[:, None] // self.block_size, last[:, None])
        blocks = self.block_table[torch.tensor(requests)].gather(1, columns)
        return (blocks[:, None] * self.num_kv_heads + torch.arange(self.num_kv_heads)[:, None]).flatten()

    def prefill(self, request: int, start: int, end: int) -> PrefillTile:
        first = self.first(request, end - start)
        num_tokens = self.seq_lens[request] - first
        return PrefillTile(start, end, num_tokens, self.block_rows([request], [first], self.padded(num_tokens)))

    def decodes(self, starts: list[int], num_decodes: int) -> list[DecodeTile]:
        """Decodes by length, so that little is padding; a tile holds as many as stay in the caches."""
        firsts = [self.first(r, 1) for r in range(num_decodes)]
        waiting = sorted(range(num_decodes), key=lambda r: firsts[r] - self.seq_lens[r])
        tiles = []
        while waiting:
            length = self.padded(self.seq_lens[waiting[0]] - firsts[waiting[0]])
            most = max(1, DECODE_TILE // (length * self.num_kv_heads * self.head_dim))
            # Requests half as long get a tile of their own, unless all are so short that the calls cost more.
            long_enough = 0 if length <= CHUNK else length // 2
            tile = [r for r in waiting[:most] if self.seq_lens[r] - firsts[r] > long_enough]
            waiting = waiting[len(tile) :]
            tiles.append(self.decode(tile, [firsts[r] for r in tile], starts, length))
        return tiles

    def decode(self, requests: list[int], firsts: list[int], starts: list[int], length: int) -> DecodeTile:
        num_tokens = torch.tensor([self.seq_lens[r] for r in requests])[:, None] - torch.tensor(firsts)[:, None]
        positions = torch.arange(length)
        stale = positions >= num_tokens
        masked = stale if self.window is None else stale | (positions < num_tokens - self.window)
        stale_rows = stale[:, None].expand(-1, self.num_kv_heads, -1).flatten().nonzero().flatten()
        return DecodeTile(
            tokens=torch.tensor([starts[r] for r in requests]),
            block_rows=self.block_rows(requests, firsts, length),
            masked=masked[:, None],
            stale_rows=stale_rows,
            length=length,
        )


def plan_reference(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    num_decodes: int,
    cache_shape: torch.Size,
    window: int | None,
) -> ReferencePlan:
    """Cut a batch into tiles. `cache_shape` is that of the keys: [num_blocks, kv_heads, block_size, D]."""
    _, num_kv_heads, block_size, head_dim = cache_shape
    planner = _Planner(seq_lens.tolist(), block_table.long(), block_size, num_kv_heads, head_dim, window)
    starts: list[int] = query_start_loc.tolist()
    prefills = (
        planner.prefill(request, starts[request], starts[request + 1])
        for request in range(num_decodes, len(planner.seq_lens))
        if starts[request + 1] > starts[request]
    )
    return ReferencePlan(tuple(planner.decodes(starts, num_decodes)), tuple(prefills), window)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
