"""Retention: blocks of sessions whose next turn is expected, which are evicted after all others."""

from collections.abc import Iterable
from itertools import chain

from proa_engine.core.kv.block_pool import NOBODY
from proa_engine.core.kv.block_tables import held
from proa_engine.core.kv.pools import Pools
from proa_engine.core.kv.prefix_cache import Checkpoint
from proa_engine.core.request import Request, RequestStatus


class Retention:
    """Retains the blocks of requests for the streams that they came from, until these release them or end.

    Where a request continues only at checkpoints, what its last one needs is retained, and what its earlier ones need
    no longer is: the next turn of its session continues at the last.
    """

    def __init__(self, device: Pools, block_size: int) -> None:
        self._block_size = block_size
        self._cache, self._blocks, self._states = device.cache, device.blocks, device.states

    def keep(self, request: Request) -> None:
        """Retain what a running request has cached, if it asks for that. Call it before the request is freed.

        Of one that was aborted only blocks of its prompt: who releases them does not know how many tokens it had.
        """
        if request.owner == NOBODY:
            return
        blocks = held(request.tables[0])
        if request.status is RequestStatus.FINISHED_ABORTED:
            blocks = blocks[: request.num_prompt_tokens // self._block_size]
        for block in blocks:
            if block.cached_in:
                self._blocks.retain(block, request.owner)
        if not self._cache.checkpoints:
            return
        passed = [each for each in map(self._cache.checkpoints.get, request.block_hashes) if each]
        for checkpoint in passed[:-1]:
            self._release(checkpoint, request.owner, is_next=False)
        for checkpoint in passed[-1:]:
            for block in chain.from_iterable(checkpoint.window_blocks):
                self._blocks.retain(block, request.owner)
            for state in checkpoint.states:
                self._states.retain(state, request.owner)

    def release(self, owner: int, hashes: Iterable[bytes]) -> None:
        """End the retention of blocks, given by their hashes in the order of a prompt; the last is evicted next."""
        for block_hash in hashes:
            if block := self._cache.cached_blocks.get(block_hash):
                self._blocks.release(block, owner, is_next=True)
            if checkpoint := self._cache.checkpoints.get(block_hash):
                self._release(checkpoint, owner, is_next=True)

    def num_blocks_of(self, owner: int) -> int:
        """Return how many blocks are retained for a stream. From any thread."""
        return self._blocks.num_retained_of.get(owner, 0)

    def forget(self, owner: int) -> None:
        """End the retention of all blocks of a stream that has ended. They stay cached."""
        for pool in (self._blocks, self._states):
            if pool.num_retained:
                for block in pool.blocks:
                    pool.release(block, owner, is_next=False)

    def reset(self) -> None:
        """End the retention of all blocks, whose content is of no use any more."""
        for pool in (self._blocks, self._states):
            for block in pool.blocks:
                for owner in block.owners:
                    pool.release(block, owner, is_next=True)

    def _release(self, checkpoint: Checkpoint, owner: int, *, is_next: bool) -> None:
        for block in chain.from_iterable(checkpoint.window_blocks):
            self._blocks.release(block, owner, is_next=is_next)
        for state in checkpoint.states:
            self._states.release(state, owner, is_next=is_next)
