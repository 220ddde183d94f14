"""KVCacheManager: allocates KV cache blocks to requests and finds cached prefixes for them."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from proa_engine.core.block_pool import Block, BlockPool
from proa_engine.core.cache_groups import CacheGroups
from proa_engine.core.prefix_cache import PrefixCache
from proa_engine.core.request import Request

# (hash of the block before, this block's token ids, extra keys) -> hash of this block
BlockHashFunction = Callable[[bytes, Sequence[int], Sequence[bytes | str]], bytes]


@dataclass(frozen=True, slots=True)
class Hit:
    """A request's cached prefix of `num_tokens` tokens. It holds no references to the blocks."""

    num_tokens: int = 0
    blocks: Sequence[Block] = ()  # of table 0


MISS = Hit()


class KVCacheManager:
    """Block tables of requests over a `BlockPool`, and their prefix cache.

    `hash_block` None disables prefix caching. `root_hash` is the parent hash of every sequence's first block.
    """

    def __init__(
        self,
        groups: CacheGroups,
        *,
        hash_block: BlockHashFunction | None = None,
        root_hash: bytes = b"",
        block_order: Sequence[int] | None = None,
    ) -> None:
        self.groups = groups
        self.num_queried_tokens = 0  # of requests when they were first scheduled, since start
        self.num_hit_tokens = 0
        self._block_size = groups.block_size
        self._cache = PrefixCache()
        self._pool = BlockPool(groups.num_blocks, self._cache.evict, order=block_order)
        self.kv_events = self._cache.kv_events
        self._hash_block = hash_block
        self._root_hash = root_hash

    @property
    def usage(self) -> float:
        """Share of blocks held by requests, 0 to 1."""
        return self._pool.usage

    def get_computed_blocks(self, request: Request) -> Hit:
        """The request's longest cached prefix.

        The last token is always left to compute. Empty for a request with prompt log probabilities: these need every
        token to be computed.
        """
        if self._hash_block is None or request.sampling_params.prompt_logprobs is not None:
            return MISS
        blocks: list[Block] = []
        for index in range((request.num_tokens - 1) // self._block_size):
            block = self._cache.names.get(self._block_hash(request, index))
            if block is None:
                break
            blocks.append(block)
        return Hit(len(blocks) * self._block_size, blocks)

    def allocate_slots(self, request: Request, num_tokens: int, hit: Hit | None = None) -> list[list[int]] | None:
        """Extend the request's tables so that `num_tokens` tokens in total can be computed.

        `hit` is set for a request that holds no blocks yet. Returns the ids of the added blocks by table, those of the
        hit first. If there are not enough free blocks, returns None and changes nothing.
        """
        computed = () if hit is None else hit.blocks
        num_new = -(-(num_tokens - request.num_slots) // self._block_size) - len(computed)
        num_reused = sum(block.ref_count == 0 for block in computed)
        if num_new > self._pool.num_free_blocks - num_reused:
            return None
        if hit is not None:
            request.tables = [[]]
            request.num_published_blocks = len(computed)
        self._pool.touch(computed)
        added = [*computed, *self._pool.get_new_blocks(max(0, num_new))]
        (table,) = request.tables
        table += added
        request.num_slots = len(table) * self._block_size
        return [[block.block_id for block in added]]

    def publish(self, filling: Iterable[tuple[Request, int]]) -> None:
        """Add the blocks that a step fills to the prefix cache, if the host knows their tokens.

        `filling` are the step's requests that may fill a block, each with the first token that the step computes. Call
        it when the step is planned: a request that finds a block must be computed in a later step than the block.
        """
        if self._hash_block is None:
            return
        for request, _ in filling:
            first = request.num_published_blocks
            num_full = min(request.num_computed_tokens, request.num_tokens) // self._block_size
            if num_full > first:
                for index in range(first, num_full):
                    self._cache.add(request.tables[0][index], self._block_hash(request, index))
                request.num_published_blocks = num_full

    def free(self, request: Request) -> None:
        """Free all blocks of the request. They stay in the prefix cache until they are allocated again."""
        for table in request.tables:
            self._pool.free_blocks(table)
        request.tables = []
        request.num_slots = 0
        request.num_published_blocks = 0

    def reset_prefix_cache(self, running: Iterable[Request] = ()) -> None:
        """Empty the prefix cache, as after a change of weights.

        The `running` requests keep their blocks and add none to the cache, because their KV is of the old weights.
        """
        self._cache.reset()
        for request in running:
            request.num_published_blocks = sys.maxsize

    def record_lookup(self, num_tokens: int, num_hits: int) -> None:
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += num_hits

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raises `AssertionError` unless exactly the blocks of `requests`, all unfinished ones, are in use."""
        self._pool.check_integrity()
        self._cache.check_integrity(self._pool.blocks)
        references: dict[int, int] = {}
        for request in requests:
            assert len(request.tables) == self.groups.num_tables
            for table in request.tables:
                for block in table:
                    references[block.block_id] = references.get(block.block_id, 0) + 1
            assert request.num_slots == min(map(len, request.tables)) * self._block_size
            assert request.num_computed_tokens <= request.num_slots, f"{request.request_id!r} has tokens without a slot"
        used = {block.block_id: block.ref_count for block in self._pool.blocks if block.ref_count}
        assert references == used, "reference counts differ from the block tables"

    def _block_hash(self, request: Request, index: int) -> bytes:
        """Hash of the request's block `index`, whose tokens are known and whose earlier blocks are hashed."""
        hashes = request.block_hashes
        if index == len(hashes):
            assert self._hash_block is not None
            start = index * self._block_size
            parent = hashes[-1] if hashes else self._root_hash
            extra_keys = (request.cache_salt,) if request.cache_salt else ()
            tokens = request.token_ids[start : start + self._block_size]
            hashes.append(self._hash_block(parent, tokens, extra_keys))
        return hashes[index]
