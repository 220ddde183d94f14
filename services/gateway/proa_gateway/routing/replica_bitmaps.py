"""ReplicaBitmaps: block hash to a bitmap of the replicas that have the block.

One dictionary look-up answers for all replicas. Operations on many blocks use set and dict operations where possible: a
Python loop takes ten times as long.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence

_KEY_BYTES = 64  # a 16-byte hash as a Python object, rounded up by the allocator


class ReplicaBitmaps:
    """Holds at most `max_blocks` blocks after `evict` has run to its end.

    Eviction approximates least recent use with three generations, because an exact order costs more than all other
    work: used blocks are in the young generation, blocks are evicted from the old one, in any order. A generation moves
    on when the next one is empty; the young one, when it has half of `max_blocks`. So there is time to use a block
    again before its generation is evicted.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._young: dict[bytes, int] = {}
        self._aging: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._eviction_order: Iterator[bytes] = iter(())

    def __len__(self) -> int:
        return len(self._young) + len(self._aging) + len(self._old)

    def num_bytes(self, num_replicas: int) -> int:
        """Estimate of the memory in use."""
        bitmap_bytes = sys.getsizeof(1 << max(0, num_replicas - 1))
        dictionaries = sum(map(sys.getsizeof, (self._young, self._aging, self._old)))
        return dictionaries + len(self) * (_KEY_BYTES + bitmap_bytes)

    def get(self, block_hash: bytes) -> int:
        """Return the bitmap of the replicas that have the block."""
        return self._young.get(block_hash) or self._aging.get(block_hash) or self._old.get(block_hash, 0)

    def match(self, block_hashes: Sequence[bytes]) -> list[tuple[int, int]]:
        """Return (length, bitmap) pairs: which replicas have exactly how many leading blocks of the prompt.

        An engine evicts the tail of a prompt before its head, so where a replica's part ends is found by bisection.
        """
        young, aging, old = self._young.get, self._aging.get, self._old.get
        found: list[tuple[int, int]] = []
        first = self.get(block_hashes[0]) if block_hashes else 0
        # Replicas whose part ends between `low`, the last block known to be present, and `high`, the last possible one.
        ranges = [(first, 0, len(block_hashes) - 1)]
        while ranges:
            replicas, low, high = ranges.pop()
            while replicas and low < high:
                middle = (low + high + 1) // 2
                block_hash = block_hashes[middle]
                present = replicas & (young(block_hash) or aging(block_hash) or old(block_hash, 0))
                if present == replicas:
                    low = middle
                    continue
                if present:
                    ranges.append((present, middle, high))
                replicas, high = replicas ^ present, middle - 1
            if replicas:
                found.append((low + 1, replicas))
        return found

    def touch(self, block_hashes: Sequence[bytes]) -> None:
        """Mark blocks as used: move them to the young generation."""
        for generation in (self._aging, self._old):
            if generation:
                for block_hash in generation.keys() & block_hashes:
                    self._young[block_hash] = generation.pop(block_hash)

    def add(self, bit: int, block_hashes: Sequence[bytes]) -> None:
        """The replica has all of these blocks."""
        young, aging, old = self._young, self._aging, self._old
        if all(generation.keys().isdisjoint(block_hashes) for generation in (young, aging, old)):
            young.update(dict.fromkeys(block_hashes, bit))
            return
        for block_hash in block_hashes:
            young[block_hash] = (young.get(block_hash) or aging.pop(block_hash, 0) or old.pop(block_hash, 0)) | bit

    def remove(self, bit: int, block_hashes: Iterable[bytes]) -> None:
        """The replica, which had all of these blocks, no longer has them."""
        young, aging, old = self._young, self._aging, self._old
        for block_hash in block_hashes:
            bitmaps = young if block_hash in young else aging if block_hash in aging else old
            bitmap = bitmaps[block_hash] ^ bit
            if bitmap:
                bitmaps[block_hash] = bitmap
            else:
                del bitmaps[block_hash]

    def evict(self) -> Iterator[tuple[bytes, int]]:
        """Evict blocks until at most `max_blocks` are left. Yield each with its bitmap."""
        while True:
            if not self._aging and len(self._young) > self._max_blocks // 2:
                self._aging, self._young = self._young, {}
            if not self._old and self._aging:
                self._old, self._aging = self._aging, {}
                self._eviction_order = iter(list(self._old))
                continue
            if len(self) <= self._max_blocks:
                return
            block_hash = next(self._eviction_order)
            if bitmap := self._old.pop(block_hash, 0):  # 0: it was used since, or removed
                yield block_hash, bitmap

    def check_integrity(self, bitmaps: dict[bytes, int]) -> None:
        """For tests. Raises `AssertionError` unless exactly `bitmaps` are stored."""
        assert bitmaps == self._young | self._aging | self._old
        assert len(bitmaps) == len(self)
        assert len(bitmaps) <= self._max_blocks
