"""BlockMasks: who holds which block, an integer a block with a bit for each replica; those used longest ago go first.

One look-up says of all replicas whether they hold a block. What is done to many blocks is done by containers where that
can be: a loop takes ten times as long.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence

_KEY_BYTES = 64  # a hash as Python object, as the allocator rounds it


class BlockMasks:
    """Of no more than `max_blocks` blocks, once `trim` has gone through."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        # Two generations instead of an exact order of use, which would cost more than all the rest: what is used is
        # kept among the young; the old ones are given up one by one, and when none is left, the young are the old.
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._next_to_go: Iterator[bytes] = iter(())

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def num_bytes(self, num_replicas: int) -> int:
        """Memory in use."""
        mask_bytes = sys.getsizeof(1 << max(0, num_replicas - 1))
        return sys.getsizeof(self._young) + sys.getsizeof(self._old) + len(self) * (_KEY_BYTES + mask_bytes)

    def match(self, block_hashes: Sequence[bytes]) -> list[tuple[int, int]]:
        """How many of the blocks, counted from the first, are held by exactly which replicas, as bits.

        An engine gives away the tail of a prompt before its head, so where a replica's part ends is found by bisection.
        """
        young, old = self._young.get, self._old.get
        found: list[tuple[int, int]] = []
        first = (young(block_hashes[0]) or old(block_hashes[0], 0)) if block_hashes else 0
        ranges = [(first, 0, len(block_hashes) - 1)]  # of whom, the last block known to be held, the last that may be
        while ranges:
            holders, low, high = ranges.pop()
            while holders and low < high:
                middle = (low + high + 1) // 2
                block_hash = block_hashes[middle]
                still = holders & (young(block_hash) or old(block_hash, 0))
                if still == holders:
                    low = middle
                    continue
                if still:
                    ranges.append((still, middle, high))
                holders, high = holders ^ still, middle - 1
            if holders:
                found.append((low + 1, holders))
        return found

    def keep(self, block_hashes: Sequence[bytes]) -> None:
        """These are used: none of them is old."""
        if self._old:
            for block_hash in self._old.keys() & block_hashes:
                self._young[block_hash] = self._old.pop(block_hash)

    def set(self, bit: int, block_hashes: Sequence[bytes]) -> None:
        """The replica holds all of these."""
        young, old = self._young, self._old
        if young.keys().isdisjoint(block_hashes) and old.keys().isdisjoint(block_hashes):
            young.update(dict.fromkeys(block_hashes, bit))
            return
        for block_hash in block_hashes:
            young[block_hash] = (young.get(block_hash) or old.pop(block_hash, 0)) | bit

    def clear(self, bit: int, block_hashes: Iterable[bytes]) -> None:
        """The replica, which held all of these, does no more."""
        young, old = self._young, self._old
        for block_hash in block_hashes:
            masks = young if block_hash in young else old
            mask = masks[block_hash] ^ bit
            if mask:
                masks[block_hash] = mask
            else:
                del masks[block_hash]

    def trim(self) -> Iterator[tuple[bytes, int]]:
        """Gives up blocks that are too many. Yields each with its holders."""
        while len(self) > self._max_blocks:
            if not self._old:
                self._old, self._young = self._young, {}
                self._next_to_go = iter(list(self._old))
            block_hash = next(self._next_to_go)
            if mask := self._old.pop(block_hash, 0):  # 0: it is young again, or gone
                yield block_hash, mask

    def check_integrity(self, masks: dict[bytes, int]) -> None:
        """Raises `AssertionError` unless these are the ones. For tests."""
        assert self._young.keys().isdisjoint(self._old)
        assert masks == self._young | self._old
        assert len(masks) <= self._max_blocks
