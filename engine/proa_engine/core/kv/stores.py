"""Stores: blocks and checkpoints of the device that are to be copied to host memory."""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain

from proa_engine.core.kv.pools import PlannedReferences, Pools
from proa_engine.core.kv.state_slots import slot_of
from proa_engine.core.types import Block, Copies, StoredCheckpoint


class Stores:
    """The queue of what the device has cached, in the order in which it did."""

    def __init__(self, device: Pools, host: Pools, planned: PlannedReferences, *, state_pages: int) -> None:
        self.num_pages = 0  # stored since the start
        self.num_skipped = 0  # blocks that were not stored: the queue was full, or no page was free
        self.queue: deque[tuple[bytes, Block | None]] = deque()  # block of table 0; None: a checkpoint
        self._device = device
        self._host = host
        self._planned = planned
        self._state_pages = state_pages

    def add_blocks(self, blocks: Iterable[tuple[bytes, Block]]) -> None:
        """Queue blocks of table 0 that were just cached, with their hashes; a later plan stores them."""
        for block in blocks:
            self.queue.append(block)
            if len(self.queue) > self._host.blocks.num_blocks:
                self.queue.popleft()
                self.num_skipped += 1

    def add_checkpoint(self, checkpoint_hash: bytes) -> None:
        """Queue a checkpoint that was just made; a later plan stores it."""
        self.queue.append((checkpoint_hash, None))

    def plan_next(self, copies: Copies) -> int:
        """Plan to store the first in the queue, unless it was evicted, or host memory has it or has no room. Returns
        the number of pages to copy."""
        block_hash, block = self.queue.popleft()
        if not block:
            return self._plan_checkpoint(block_hash, copies)
        host = self._host
        if self._device.cache.cached_blocks.get(block_hash) is not block or block_hash in host.cache.cached_blocks:
            return 0
        if not host.blocks.num_free_blocks:
            self.num_skipped += 1
            return 0
        (page,) = host.blocks.get_new_blocks(1)
        host.cache.add(page, block_hash)
        self._planned.pages.append(page)
        copies.stores.append((block.block_id, page.block_id))
        copies.stored_blocks.append((page.block_id, block_hash))
        self.num_pages += 1
        return 1

    def _plan_checkpoint(self, checkpoint_hash: bytes, copies: Copies) -> int:
        """Plan to store a checkpoint as a whole, or not at all.

        Pages that are in host memory already are referenced first: allocating others may evict the checkpoint that they
        belong to.
        """
        host, planned = self._host, self._planned
        source = self._device.cache.checkpoints.get(checkpoint_hash)
        if source is None or checkpoint_hash in host.cache.checkpoints:
            return 0
        known = [
            [cached.get(block.block_hash) for block in blocks]
            for cached, blocks in zip(host.cache.cached_window_blocks, source.window_blocks, strict=True)
        ]
        shared = [page for page in chain.from_iterable(known) if page]
        num_new, num_states = sum(map(len, known)) - len(shared), len(source.states)
        host.blocks.touch(shared)
        if host.blocks.num_free_blocks < num_new or host.states.num_free_blocks < num_states:
            host.blocks.free_blocks(shared)
            self.num_skipped += num_new
            return 0
        new, states = host.blocks.get_new_blocks(num_new), host.states.get_new_blocks(num_states)
        planned.pages += [*shared, *new]
        planned.states += states
        self._device.states.touch(source.states)
        planned.stored_states += source.states
        remaining, stored = iter(new), list[Sequence[tuple[bytes, Block]]]()
        for blocks, pages in zip(source.window_blocks, known, strict=True):
            targets = [page or next(remaining) for page in pages]
            stored.append([(block.block_hash, page) for block, page in zip(blocks, targets, strict=True)])
            copies.stores += [
                (block.block_id, target.block_id)
                for block, page, target in zip(blocks, pages, targets, strict=True)
                if not page
            ]
        copies.state_stores += [
            (state.block_id, slot.block_id) for state, slot in zip(source.states, states, strict=True)
        ]
        host.cache.add_checkpoint(checkpoint_hash, stored, states)
        tails = [[(page.block_id, block_hash) for block_hash, page in pages] for pages in stored]
        copies.stored_checkpoints.append(StoredCheckpoint(checkpoint_hash, tails, slot_of(states)))
        self.num_pages += num_new
        return num_new + num_states * self._state_pages
