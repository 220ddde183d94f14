"""BlockTables: allocates blocks to the tables of requests, and frees those that a window has passed."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from proa_engine.core.kv.block_pool import BlockPool
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.kv.encoder_blocks import CrossAudio, EncoderBlocks
from proa_engine.core.request import Request
from proa_engine.core.types import Block


class BlockTables:
    """The block tables of running requests, allocated from one pool.

    Table 0 has a block for every token. A table with a sliding window has blocks only from the first column that the
    request's next token attends to, however long the request is. A request that reads an audio has its blocks apart
    from the tables, from its start to its end.
    """

    def __init__(self, groups: CacheGroups, pool: BlockPool, encoder_blocks: EncoderBlocks) -> None:
        self._groups = groups
        self._pool = pool
        self._encoder_blocks = encoder_blocks
        self._block_size = groups.block_size
        self._window_columns = [groups.window_columns(window) for window in groups.windows]

    def allocate(
        self, request: Request, num_tokens: int, blocks: Sequence[Block], window_blocks: Sequence[Sequence[Block]]
    ) -> list[list[int]] | None:
        """Allocate slots for `num_tokens` tokens to a request without blocks, starting with cached blocks.

        `blocks` are of table 0, and `window_blocks` of the tables with windows. Returns the ids of each table's blocks,
        -1 where a table has none. If there are not enough free blocks, returns None and changes nothing.
        """
        num_cached, windows = len(blocks), self._groups.windows
        firsts = [self._groups.first_column(window, num_cached * self._block_size) for window in windows]
        needs = [max(end - num_cached, 0) for end in self._ends(request, num_tokens, firsts)]
        cached, num_new, audio = [*blocks, *chain.from_iterable(window_blocks)], sum(needs), request.media
        num_encoded = 0
        if isinstance(audio, CrossAudio):
            encoded = self._encoder_blocks.find(audio)
            cached += encoded
            num_encoded = 0 if encoded else self._num_columns(audio.num_tokens)
        if num_new + num_encoded > self._pool.num_free_blocks - self._pool.num_free_of(cached):
            return None
        # Allocating evicts free blocks, so the hit's blocks are referenced first.
        self._pool.touch(cached)
        request.tables = [list(blocks)]
        for index, first in enumerate(firsts):
            behind = window_blocks[index] if window_blocks else ()
            request.tables.append([*[None] * (num_cached - len(behind)), *behind])
            assert len(behind) == num_cached - first, "a checkpoint has all blocks behind the window"
        request.first_columns = firsts
        self._extend(request, needs)
        if isinstance(audio, CrossAudio):
            request.encoded = self._encoder_blocks.use(audio, self._pool.get_new_blocks(num_encoded))
        return [[-1 if block is None else block.block_id for block in table] for table in request.tables]

    def extend(self, request: Request, num_tokens: int) -> list[list[int]] | None:
        """Extend the tables so that `num_tokens` tokens in total can be computed. Returns the new ids by table.

        If there are not enough free blocks, returns None and allocates nothing.
        """
        if request.first_columns:
            self._free_behind_windows(request)
            ends = self._ends(request, num_tokens, request.first_columns)
            needs = [max(end - len(table), 0) for end, table in zip(ends, request.tables, strict=True)]
            return None if sum(needs) > self._pool.num_free_blocks else self._extend(request, needs)
        table = request.tables[0]  # the common case first: with 256 decodes, 16 extend their table in every step
        need = -(-num_tokens // self._block_size) - len(table)
        if need > self._pool.num_free_blocks:
            return None
        blocks = self._pool.get_new_blocks(need)
        table += blocks
        request.num_slots = len(table) * self._block_size
        return [[block.block_id for block in blocks]]

    def free(self, request: Request) -> None:
        """Free all blocks of the request, those of table 0 to be evicted first, those of its audio last."""
        for table, first in zip(request.tables, (0, *request.first_columns), strict=True):
            self._pool.free_blocks(held(table[first:]))
        self._pool.free_blocks(request.encoded)
        request.tables, request.first_columns, request.encoded = [], [], ()
        request.num_slots = 0

    def window_blocks(self, request: Request, position: int) -> list[list[Block]] | None:
        """Return the blocks behind the window before `position`, by table with a window; None if some are freed
        already."""
        firsts = [self._groups.first_column(window, position) for window in self._groups.windows]
        if any(map(int.__lt__, firsts, request.first_columns)):
            return None
        end = position // self._block_size
        return [held(table[first:end]) for table, first in zip(request.tables[1:], firsts, strict=True)]

    def check_integrity(self, requests: Iterable[Request], held_blocks: Iterable[Block]) -> None:
        """Raises `AssertionError` unless exactly the blocks of `requests` and `held_blocks` are in use.

        Blocks that the windows have passed must be free.
        """
        references = Counter(block.block_id for block in held_blocks)
        for request in requests:
            assert len(request.tables) == self._groups.num_tables
            for table, first in zip(request.tables, (0, *request.first_columns), strict=True):
                assert not any(table[:first]), "a block before the first column"
                assert all(table[first:]), "no block from the first column on"
                for block in held(table[first:]):
                    references[block.block_id] += 1
            num_encoded = request.media.num_tokens if isinstance(request.media, CrossAudio) else 0
            assert len(request.encoded) == self._num_columns(num_encoded)
            references.update(block.block_id for block in request.encoded)
            lowest = min(request.num_computed_tokens, request.num_tokens - 1)
            for index, window in enumerate(self._groups.windows):
                first = request.first_columns[index]
                assert first <= self._groups.first_column(window, lowest), "a freed block is still attended to"
                assert len(request.tables[1 + index]) - first <= self._window_columns[index]
            assert request.num_slots <= min(map(len, request.tables)) * self._block_size
            assert request.num_computed_tokens <= request.num_slots, f"{request.request_id!r} has tokens without a slot"
        used = {block.block_id: block.ref_count for block in self._pool.blocks if block.ref_count}
        assert references == used, "reference counts differ from the block tables"

    def _ends(self, request: Request, num_tokens: int, firsts: Sequence[int]) -> Sequence[int]:
        """Return the number of columns that each table needs at least.

        A table with a window gets all the columns that it may use, up to the end of the known tokens. The later chunks
        of a prompt then only replace the blocks that they free.
        """
        columns = self._num_columns(num_tokens)
        known = max(columns, self._num_columns(request.num_tokens))
        return [columns, *[min(known, first + most) for first, most in zip(firsts, self._window_columns, strict=True)]]

    def _num_columns(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _extend(self, request: Request, needs: Sequence[int]) -> list[list[int]]:
        blocks, start, added = self._pool.get_new_blocks(sum(needs)), 0, []
        for table, need in zip(request.tables, needs, strict=True):
            new = blocks[start : start + need]
            start += need
            table += new
            added.append([block.block_id for block in new])
        request.num_slots = min(map(len, request.tables)) * self._block_size
        return added

    def _free_behind_windows(self, request: Request) -> None:
        """Free the blocks that no later token attends to.

        The next step may begin as early as at the last known token: if drafts in flight are rejected, it begins before
        `num_computed_tokens`. The last full block before that keeps what is behind its window, for a checkpoint at the
        request's end.
        """
        lowest = min(request.num_computed_tokens, request.num_tokens - 1)
        position = lowest // self._block_size * self._block_size
        firsts, passed = request.first_columns, list[Block]()
        for index, window in enumerate(self._groups.windows):
            first = self._groups.first_column(window, position)
            table = request.tables[1 + index]
            for column in range(firsts[index], first):
                block, table[column] = table[column], None
                assert block is not None
                passed.append(block)
            if first > firsts[index]:
                firsts[index] = first
        self._pool.free_blocks(passed)


def held(blocks: Sequence[Block | None]) -> list[Block]:
    """Return the blocks of a table from its first used column on."""
    return [block for block in blocks if block is not None]
