"""ReplicaCheckpoints: where the cache hits of engines with a checkpoint rule end.

A checkpoint is identified by the hash of the block that ends there, which covers all tokens before it. Checkpoints are
confirmed (the engine's KV events reported them) or expected (a request was sent that will make them).
"""

import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise

from proa.blocks import checkpoint_positions
from proa.contract import CheckpointRule
from proa_gateway.routing.hints import HashChain, RoutingHints
from proa_gateway.routing.replica_bitmaps import ReplicaBitmaps

_EXPECTED_BYTES = 64 + 32  # a 16-byte hash and a time as Python objects, rounded up by the allocator


class _Replica:
    """One replica's checkpoints, all of them also in the bitmaps. None is both confirmed and expected."""

    __slots__ = ("block_size", "confirmed", "expected", "rule")

    def __init__(self, rule: CheckpointRule, block_size: int) -> None:
        self.rule = rule
        self.block_size = block_size  # tokens
        self.confirmed: set[bytes] = set()
        self.expected: dict[bytes, float] = {}  # -> time last expected, oldest first


class ReplicaCheckpoints:
    """Replicas are named by their bit. Replicas without a rule are not added: their hits end at any block.

    Holds at most `max_checkpoints` distinct checkpoints, evicted by least recent use (approximately).
    """

    def __init__(self, max_checkpoints: int) -> None:
        self._bitmaps = ReplicaBitmaps(max_checkpoints)
        self._replicas: dict[int, _Replica] = {}  # by bit
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
        self._replicas[bit] = _Replica(rule, chain.block_size)

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
