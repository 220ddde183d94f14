"""BlockPool: reference counts of blocks, and the free lists in the order of eviction."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from proa_engine.core.types import Block

NOBODY: Final = 0
"""The owner of blocks that are not retained."""


class FreeBlockQueue:
    """Free blocks in the order in which they are allocated. Every operation is O(1)."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._end = Block(-1)  # before the first and behind the last one, so that no operation has to handle an end
        self.num_blocks = 0
        for block in blocks:
            self.append(block)

    def append(self, block: Block) -> None:
        """Make `block` the last to be allocated."""
        self._link(self._end.prev, block, self._end)

    def append_left(self, block: Block) -> None:
        """Make `block` the next to be allocated."""
        self._link(self._end, block, self._end.next)

    def pop_left(self) -> Block:
        block = self._end.next
        assert block is not self._end, "no block is free"
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Remove `block` from anywhere in the queue."""
        before, after = block.prev, block.next
        assert before is not block, f"block {block.block_id} is not free"
        before.next, after.prev = after, before
        block.prev = block.next = block
        self.num_blocks -= 1

    def to_list(self) -> list[Block]:
        """All blocks in order. Raises `AssertionError` for inconsistent links."""
        blocks: list[Block] = []
        block = self._end.next
        while block is not self._end:
            assert block.prev.next is block, f"broken link at block {block.block_id}"
            assert len(blocks) < self.num_blocks, "the free list never ends"
            blocks.append(block)
            block = block.next
        assert len(blocks) == self.num_blocks
        return blocks

    def _link(self, before: Block, block: Block, after: Block) -> None:
        assert block.prev is block, f"block {block.block_id} is free already"
        before.next, after.prev = block, block
        block.prev, block.next = before, after
        self.num_blocks += 1


class BlockPool:
    """Blocks in use and free blocks.

    Cached blocks may be retained for owners, the streams of gateways. Free ones are evicted after all others then. A
    block is retained until each of its owners has released it, or until it is evicted.

    `order` is the order in which the blocks are first allocated, a permutation of the ids; ascending by default.
    `evict` is called with a free cached block that is about to be allocated; it must remove the block from the prefix
    cache. It returns other free blocks that are worth nothing without it: they are allocated next.
    """

    def __init__(
        self, num_blocks: int, evict: Callable[[Block], Sequence[Block]], *, order: Sequence[int] | None = None
    ) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        order = range(num_blocks) if order is None else order
        assert sorted(order) == list(range(num_blocks)), "order must be a permutation of the block ids"
        self._free = FreeBlockQueue(self.blocks[block_id] for block_id in order)
        self._free_retained = FreeBlockQueue(())
        self.num_retained = 0  # free ones and such in use
        self.num_retained_of: dict[int, int] = {}  # by owner
        self._evict = evict

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free_blocks(self) -> int:
        return self._free.num_blocks + self._free_retained.num_blocks

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0 to 1."""
        return 1.0 - self.num_free_blocks / len(self.blocks)

    def num_free_of(self, blocks: Iterable[Block]) -> int:
        """How many of these blocks are free."""
        return sum(block.ref_count == 0 for block in blocks)

    def get_new_blocks(self, count: int) -> list[Block]:
        """Allocate `count` blocks and evict them from the prefix cache. The caller checks that enough are free."""
        blocks = []
        for _ in range(count):
            block = (self._free if self._free.num_blocks else self._free_retained).pop_left()
            if block.cached_in is not None:
                for other in self._evict(block):
                    self.demote(other)
            if block.owners:
                self._forget_owners(block)
            block.ref_count = 1
            blocks.append(block)
        return blocks

    def touch(self, blocks: Iterable[Block]) -> None:
        """Add a reference to each block. Free ones leave the free list and keep their content."""
        for block in blocks:
            if block.ref_count == 0:
                self._queue_of(block).remove(block)
            block.ref_count += 1

    def free_blocks(self, blocks: Sequence[Block]) -> None:
        """Drop one reference to each of a request's blocks, in the order of its tokens.

        This defines the eviction order: blocks that are not cached first, then cached ones in the order in which they
        became free, those that are retained after all others. A request's last block is evicted before its first,
        because a prefix is matched from its beginning.
        """
        for block in reversed(blocks):
            assert block.ref_count > 0, f"block {block.block_id} is freed twice"
            block.ref_count -= 1
            if block.ref_count > 0:
                continue
            if block.cached_in is None:
                if block.owners:
                    self._forget_owners(block)
                self._free.append_left(block)
            else:
                (self._free_retained if block.owners else self._free).append(block)

    def refresh(self, block: Block) -> None:
        """Move a block to the end of its list, if it is free."""
        if block.ref_count == 0:
            queue = self._queue_of(block)
            queue.remove(block)
            queue.append(block)

    def demote(self, block: Block) -> None:
        """Move a free block that is no longer in the prefix cache to the front of the eviction order."""
        self._queue_of(block).remove(block)
        self._forget_owners(block)
        self._free.append_left(block)

    def retain(self, block: Block, owner: int) -> None:
        """Evict the cached block after those that nobody retains."""
        if owner in block.owners:
            return
        if not block.owners:
            self.num_retained += 1
            if block.ref_count == 0:
                self._free.remove(block)
                self._free_retained.append(block)
        block.owners = (*block.owners, owner)
        self._count(owner, 1)

    def release(self, block: Block, owner: int, *, is_next: bool) -> None:
        """End what `retain` began. A free block without other owners is evicted next, or (not `is_next`) after all that
        nobody retains."""
        if owner not in block.owners:
            return
        is_last = block.owners == (owner,)
        if is_last and block.ref_count == 0:
            self._free_retained.remove(block)
            (self._free.append_left if is_next else self._free.append)(block)
        self.num_retained -= is_last
        block.owners = tuple(each for each in block.owners if each != owner)
        self._count(owner, -1)

    def check_integrity(self) -> None:
        """Raises `AssertionError` if reference counts, owners and free lists are inconsistent."""
        retained = {block.block_id for block in self._free_retained.to_list()}
        free = {block.block_id for block in self._free.to_list()} | retained
        unreferenced = {block.block_id for block in self.blocks if block.ref_count == 0}
        assert free == unreferenced, f"free lists and reference counts differ in {sorted(free ^ unreferenced)}"
        assert retained == {block_id for block_id in unreferenced if self.blocks[block_id].owners}
        assert self.num_retained == sum(bool(block.owners) for block in self.blocks)
        assert self.num_retained_of == Counter(owner for block in self.blocks for owner in block.owners)

    def _queue_of(self, block: Block) -> FreeBlockQueue:
        return self._free_retained if block.owners else self._free

    def _forget_owners(self, block: Block) -> None:
        self.num_retained -= bool(block.owners)
        for owner in block.owners:
            self._count(owner, -1)
        block.owners = ()

    def _count(self, owner: int, change: int) -> None:
        count = self.num_retained_of.get(owner, 0) + change
        if count:
            self.num_retained_of[owner] = count
        else:
            del self.num_retained_of[owner]
