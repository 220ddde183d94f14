"""What is known of each engine's cache by block: which engines have it, and for how long a prefix it can be reused."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from proa.blocks import checkpoint_positions
from proa.contract import CheckpointRule
from proa_gateway.routing.policies import HashChain, RoutingHints

_KEY_BYTES = 64  # a 16-byte hash as a Python object, rounded up by the allocator
_EXPECTED_BYTES = 64 + 32  # a 16-byte hash and a time as Python objects, rounded up by the allocator


class ReplicaBitmaps:
    """Holds at most `max_blocks` blocks after `evict` has run to its end.

    Eviction approximates least recent use with three generations, because an exact order costs more than all other
    work: used blocks are in the young generation, blocks are evicted from the old one, in any order. A generation moves
    on when the next one is empty; the young one, when it has half of `max_blocks`. So there is time to use a block
    again before its generation is evicted.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._young: dict[bytes, int] = {}  # bitmaps of replicas by block hash, like the other generations
        self._aging: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._eviction_order: Iterator[bytes] = iter(())  # hashes of `_old` when it was filled

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


class _CheckpointReplica:
    """One replica's checkpoints, all of them also in the bitmaps. None is both confirmed and expected."""

    __slots__ = ("block_size", "confirmed", "expected", "rule")

    def __init__(self, rule: CheckpointRule, block_size: int) -> None:
        self.rule = rule
        self.block_size = block_size  # tokens
        self.confirmed: set[bytes] = set()  # checkpoints, by the hash of the block before them
        self.expected: dict[bytes, float] = {}  # -> time last expected, oldest first


class ReplicaCheckpoints:
    """Replicas are named by their bit. Replicas without a rule are not added: their hits end at any block.

    Holds at most `max_checkpoints` distinct checkpoints, evicted by least recent use (approximately).
    """

    def __init__(self, max_checkpoints: int) -> None:
        self._bitmaps = ReplicaBitmaps(max_checkpoints)
        self._replicas: dict[int, _CheckpointReplica] = {}  # by bit
        self.replicas = 0  # bitmap of them

    def num_bytes(self, num_replicas: int) -> int:
        """Estimate of the memory in use."""
        sizes = [sys.getsizeof(one.confirmed) + sys.getsizeof(one.expected) for one in self._replicas.values()]
        num_expected = sum([len(one.expected) for one in self._replicas.values()])
        return sum(sizes) + num_expected * _EXPECTED_BYTES + self._bitmaps.num_bytes(num_replicas)

    def has_expected(self, bit: int) -> bool:
        return bool(self.replicas & bit and self._replicas[bit].expected)

    def add_replica(self, bit: int, rule: CheckpointRule, chain: HashChain) -> None:
        self.replicas |= bit
        self._replicas[bit] = _CheckpointReplica(rule, chain.block_size)

    def remove_replica(self, bit: int) -> None:
        """Remove the replica, if it was added, and its checkpoints."""
        if self.replicas & bit:
            self.replicas ^= bit
            replica = self._replicas.pop(bit)
            self._bitmaps.remove(bit, (*replica.confirmed, *replica.expected))

    def shorten(self, chains: Sequence[tuple[int, int]], block_hashes: Sequence[bytes]) -> list[tuple[int, int]]:
        """Return (length, bitmap) pairs: which replicas can reuse how many leading blocks of the prompt.

        `chains`: such pairs of what the replicas have; the longest of a replica counts. A replica with a rule can reuse
        the blocks up to its last checkpoint in them. Takes one look-up a block, from the longest chain of such a
        replica down to the checkpoint that is found last.
        """
        found = [(length, replicas & ~self.replicas) for length, replicas in chains]
        with_rule = sorted([(length, replicas & self.replicas) for length, replicas in chains], reverse=True)
        searched = matched = 0
        for (length, replicas), (shorter, _) in pairwise([*with_rule, (0, 0)]):
            searched |= replicas & ~matched
            for end in range(length, shorter, -1):
                if not searched:
                    break
                if ending := searched & self._bitmaps.get(block_hashes[end - 1]):
                    found.append((end, ending))
                    searched ^= ending
                    matched |= ending
        return found

    def count_reusable(self, bit: int, length: int, block_hashes: Sequence[bytes]) -> int:
        """Return how many of the prompt's first `length` blocks, which the replica has, it can reuse."""
        if not self.replicas & bit:
            return length
        return max([end for end, replicas in self.shorten([(length, bit)], block_hashes) if replicas], default=0)

    def expect(self, bit: int, hit: int, length: int, hints: RoutingHints, now: float) -> None:
        """A request is sent to the replica, which has `length` leading blocks of it and reuses `hit`."""
        if not self.replicas & bit:
            return
        replica = self._replicas[bit]
        rule, size, expected = replica.rule, replica.block_size, replica.expected
        num_tokens = hints.num_prompt_tokens
        for position in checkpoint_positions(
            num_tokens, hit * size, length * size, rule.interval, rule.min_junction, size
        ):
            checkpoint = hints.block_hashes[position // size - 1]
            if checkpoint not in replica.confirmed:
                expected.pop(checkpoint, None)
                expected[checkpoint] = now
                self._bitmaps.add(bit, (checkpoint,))
        self._bitmaps.touch(hints.block_hashes[max(0, hit - 1) : hit])
        self._evict()

    def remove_expected(self, bit: int, until: float, capacity: int) -> None:
        """Remove the checkpoints expected since `until` or earlier, and the oldest of more than `capacity`."""
        expected = self._replicas[bit].expected if self.replicas & bit else {}
        while expected:
            checkpoint, when = next(iter(expected.items()))
            if when > until and len(expected) <= capacity:
                return
            del expected[checkpoint]
            self._bitmaps.remove(bit, (checkpoint,))

    def confirm(self, bit: int, checkpoints: Sequence[bytes]) -> None:
        """The replica's engine reported that it has these checkpoints."""
        if self.replicas & bit:
            replica = self._replicas[bit]
            replica.confirmed.update(checkpoints)
            for checkpoint in replica.expected.keys() & checkpoints:
                del replica.expected[checkpoint]
            self._bitmaps.add(bit, checkpoints)
            self._evict()

    def remove_confirmed(self, bit: int, checkpoints: Iterable[bytes]) -> None:
        """The replica's engine reported that these checkpoints no longer exist."""
        if self.replicas & bit:
            removed = self._replicas[bit].confirmed.intersection(checkpoints)
            self._replicas[bit].confirmed -= removed
            self._bitmaps.remove(bit, removed)

    def clear_confirmed(self, bit: int) -> None:
        """Drop the replica's confirmed checkpoints, because a snapshot follows. Expected ones stay."""
        if self.replicas & bit:
            self.remove_confirmed(bit, self._replicas[bit].confirmed)

    def check_integrity(self) -> None:
        """For tests. Raises `AssertionError` if bitmaps and replicas disagree."""
        bitmaps: dict[bytes, int] = {}
        for bit, replica in self._replicas.items():
            assert replica.confirmed.isdisjoint(replica.expected)
            for checkpoint in (*replica.confirmed, *replica.expected):
                bitmaps[checkpoint] = bitmaps.get(checkpoint, 0) | bit
        self._bitmaps.check_integrity(bitmaps)
        assert sum(self._replicas) == self.replicas

    def _evict(self) -> None:
        for checkpoint, bitmap in self._bitmaps.evict():
            for bit, replica in self._replicas.items():
                if bitmap & bit:
                    replica.confirmed.discard(checkpoint)
                    replica.expected.pop(checkpoint, None)
