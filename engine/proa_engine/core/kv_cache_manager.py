"""KVCacheManager: allocates KV cache blocks to requests and finds cached prefixes for them."""

import sys
from collections.abc import Callable, Iterable, Sequence

from proa_engine.core.block_pool import Block, BlockPool
from proa_engine.core.request import Request

# (hash of the block before, this block's token ids, extra keys) -> hash of this block
BlockHashFunction = Callable[[bytes, Sequence[int], Sequence[bytes | str]], bytes]


class KVCacheManager:
    """Block tables of requests over a `BlockPool`, and its prefix cache.

    `hash_block` None disables prefix caching. `root_hash` is the parent hash of every sequence's first block.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        hash_block: BlockHashFunction | None = None,
        root_hash: bytes = b"",
        block_order: Sequence[int] | None = None,
    ) -> None:
        self.block_size = block_size
        self.num_queried_tokens = 0  # of requests when they were first scheduled, since start
        self.num_hit_tokens = 0
        self._pool = BlockPool(num_blocks, block_order)
        self.kv_events = self._pool.kv_events
        self._hash_block = hash_block
        self._root_hash = root_hash

    @property
    def capacity(self) -> int:
        """Tokens that fit if one request has all blocks."""
        return self._pool.num_blocks * self.block_size

    @property
    def usage(self) -> float:
        """Share of blocks held by requests, 0 to 1."""
        return 1.0 - self._pool.num_free_blocks / self._pool.num_blocks

    def get_computed_blocks(self, request: Request) -> list[Block]:
        """The blocks of the request's longest cached prefix, without taking references to them.

        The last token is always left to compute. Empty for a request with prompt log probabilities: these need every
        token to be computed.
        """
        if self._hash_block is None or request.sampling_params.prompt_logprobs is not None:
            return []
        blocks: list[Block] = []
        for index in range((request.num_tokens - 1) // self.block_size):
            block = self._pool.get_cached_block(self._block_hash(request, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def allocate_slots(
        self, request: Request, num_tokens: int, computed_blocks: Sequence[Block] = ()
    ) -> list[int] | None:
        """Extend the request's blocks to hold `num_tokens` tokens in total.

        `computed_blocks` are the cached prefix of a request that holds no blocks yet. Returns the ids of the added
        blocks, `computed_blocks` first. If there are not enough free blocks, returns None and changes nothing.
        """
        num_new = -(-(num_tokens - request.num_slots) // self.block_size) - len(computed_blocks)
        num_reused = sum(block.ref_count == 0 for block in computed_blocks)
        if num_new > self._pool.num_free_blocks - num_reused:
            return None
        self._pool.touch(computed_blocks)
        added = [*computed_blocks, *self._pool.get_new_blocks(max(0, num_new))]
        request.blocks += added
        request.num_slots = len(request.blocks) * self.block_size
        request.num_published_blocks += len(computed_blocks)
        return [block.block_id for block in added]

    def publish(self, request: Request) -> None:
        """Add the request's full blocks to the prefix cache if their tokens are scheduled and known to the host."""
        first = request.num_published_blocks
        num_full = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        if self._hash_block is None or num_full <= first:
            return
        hashes = [self._block_hash(request, index) for index in range(first, num_full)]
        self._pool.cache_full_blocks(request.blocks[first:num_full], hashes)
        request.num_published_blocks = num_full

    def free(self, request: Request) -> None:
        """Free all blocks of the request. They stay in the prefix cache until they are allocated again."""
        self._pool.free_blocks(request.blocks)
        request.blocks = []
        request.num_slots = 0
        request.num_published_blocks = 0

    def reset_prefix_cache(self, running: Iterable[Request] = ()) -> None:
        """Empty the prefix cache, as after a change of weights.

        The `running` requests keep their blocks and add none to the cache, because their KV is of the old weights.
        """
        self._pool.reset_cache()
        for request in running:
            request.num_published_blocks = sys.maxsize

    def record_lookup(self, num_tokens: int, num_hits: int) -> None:
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += num_hits

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raises `AssertionError` unless exactly the blocks of `requests`, all unfinished ones, are in use."""
        self._pool.check_integrity()
        references: dict[int, int] = {}
        for request in requests:
            for block in request.blocks:
                references[block.block_id] = references.get(block.block_id, 0) + 1
            assert request.num_slots == len(request.blocks) * self.block_size
            assert request.num_computed_tokens <= request.num_slots, f"{request.request_id!r} has tokens without a slot"
        used = {block.block_id: block.ref_count for block in self._pool.blocks if block.ref_count}
        assert references == used, "reference counts differ from the block tables"

    def _block_hash(self, request: Request, index: int) -> bytes:
        """Hash of the request's block `index`, whose tokens are known and whose earlier blocks are hashed."""
        hashes = request.block_hashes
        if index == len(hashes):
            assert self._hash_block is not None
            start = index * self.block_size
            parent = hashes[-1] if hashes else self._root_hash
            extra_keys = (request.cache_salt,) if request.cache_salt else ()
            tokens = request.token_ids[start : start + self.block_size]
            hashes.append(self._hash_block(parent, tokens, extra_keys))
        return hashes[index]
