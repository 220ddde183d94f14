"""PrefixIndex: which replica holds which KV cache blocks, as far as the gateway can know. Knows no loads and no policy.

A replica's blocks are told by its engine's events, or expected, because a request was sent that will compute them.
"""

import sys
from collections.abc import Sequence
from itertools import compress

from proa_gateway.routing.pending_blocks import PendingBlocks
from proa_gateway.routing.replica_bitmaps import BlockMasks
from proa_gateway.types import BlockChain

MAX_BLOCKS = 1_000_000
"""Blocks that were told, with a content of their own, whoever holds them; those that were used longest ago go first.
As many may be expected, where the oldest go first."""

EXPECTED_SECONDS = 60.0
"""How long an engine that tells its blocks may take to tell one that is expected; a request may wait in its queue."""

_BITS = bytes.maketrans(b"01", b"\0\1")


class _Replica:
    """One replica's part of the index."""

    __slots__ = ("bit", "capacity", "chain", "tells", "told")

    def __init__(self, bit: int, chain: BlockChain, capacity: int) -> None:
        self.bit = bit
        self.chain = chain
        self.capacity = capacity  # in blocks
        self.tells = True
        self.told: set[bytes] = set()


class PrefixIndex:
    """Of replicas by address. Holds no more than `max_blocks` told and as many expected blocks, whatever comes."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._told = BlockMasks(max_blocks)
        self._expected = PendingBlocks()
        self._replicas: dict[str, _Replica] = {}
        self._by_number: list[_Replica | None] = []  # the number of the bit
        self._addresses: list[str] = []

    @property
    def num_blocks(self) -> int:
        return len(self._told) + self._expected.num_blocks

    @property
    def is_settled(self) -> bool:
        """Whether nothing is expected of an engine that would tell it."""
        return not any(self._expected.num_expected(one.bit) for one in self._replicas.values() if one.tells)

    @property
    def num_bytes(self) -> int:
        """Memory in use, from the sizes of the containers and of what is in them; takes microseconds."""
        sets = sum([sys.getsizeof(replica.told) for replica in self._replicas.values()])
        return sets + self._told.num_bytes(len(self._addresses)) + self._expected.num_bytes

    def add(self, address: str, chain: BlockChain, capacity: int) -> None:
        """A replica from now on, whose engine has so many blocks and holds none of a content yet."""
        self.remove(address)
        number = self._by_number.index(None) if None in self._by_number else len(self._by_number)
        replica = self._replicas[address] = _Replica(1 << number, chain, capacity)
        self._by_number[number : number + 1] = [replica]
        self._addresses[number : number + 1] = [address]

    def remove(self, address: str) -> None:
        """A replica is gone, and what it held with it. Unknown ones are ignored."""
        replica = self._replicas.pop(address, None)
        if replica is not None:
            self._told.clear(replica.bit, replica.told)
            self._expected.forget(replica.bit)
            self._by_number[self._by_number.index(replica)] = None

    def cannot_tell(self, address: str) -> None:
        """The replica's engine sends no events: what is expected of it counts until its cache must be full."""
        self._replicas[address].tells = False

    def match(self, block_hashes: Sequence[bytes]) -> list[tuple[int, list[str]]]:
        """How many of the blocks, counted from the first, which replicas hold: the longest part first, each replica
        once, those that hold none left out.

        Takes it that who holds a block holds those before it. Where an engine gave one of these away first, because
        two requests computed it at the same time, the number is too large; `count` is exact.
        """
        found = self._told.match(block_hashes) + self._expected.match(block_hashes)
        matched: list[tuple[int, list[str]]] = []
        known = 0
        for length, holders in sorted(found, reverse=True):
            if new := holders & ~known:
                matched.append((length, list(compress(self._addresses, _bits(new)))))
                known |= new
        return matched

    def count(self, address: str, block_hashes: Sequence[bytes]) -> int:
        """How many of the blocks, counted from the first, the replica holds."""
        replica = self._replicas.get(address)
        if replica is None:
            return 0
        expected = [length for length, holders in self._expected.match(block_hashes) if holders & replica.bit]
        return max(_count_told(replica.told, block_hashes), *expected[-1:], 0)

    def expect(self, address: str, chain: BlockChain, block_hashes: Sequence[bytes], now: float) -> int:
        """A request with these blocks is sent to the replica. Blocks of another chain mean nothing there. Returns how
        many, counted from the first, it holds already."""
        replica = self._replicas.get(address)
        if replica is None or replica.chain != chain:
            return 0
        num_held = self.count(address, block_hashes)
        if num_held < len(block_hashes) or not replica.told.issuperset(block_hashes[-1:]):
            self._expected.add(replica.bit, block_hashes, now)
        self._told.keep(block_hashes[:num_held])
        self._forget_expected(replica, now)
        return num_held

    def stored(self, address: str, block_hashes: Sequence[bytes]) -> None:
        """The replica's engine says that it holds these blocks."""
        replica = self._replicas[address]
        replica.told.update(block_hashes)
        self._told.set(replica.bit, block_hashes)
        self._expected.told(replica.bit, block_hashes)
        for block_hash, mask in self._told.trim():
            for holder in compress(self._by_number, _bits(mask)):
                assert holder is not None
                holder.told.discard(block_hash)

    def removed(self, address: str, block_hashes: Sequence[bytes]) -> None:
        """The replica's engine says that it no longer holds these blocks."""
        replica = self._replicas[address]
        gone = replica.told.intersection(block_hashes)
        replica.told -= gone
        self._told.clear(replica.bit, gone)

    def void(self, address: str) -> None:
        """What the replica's engine has told means nothing now; what is expected still does."""
        replica = self._replicas[address]
        self._told.clear(replica.bit, replica.told)
        replica.told = set()

    def check_integrity(self) -> None:
        """Raises `AssertionError` where masks and replicas disagree. For tests."""
        masks: dict[bytes, int] = {}
        for replica in self._replicas.values():
            for block_hash in replica.told:
                masks[block_hash] = masks.get(block_hash, 0) | replica.bit
        self._told.check_integrity(masks)
        self._expected.check_integrity()

    def _forget_expected(self, replica: _Replica, now: float) -> None:
        """What was not told in time by an engine that tells, and the oldest of what exceeds its cache or our memory."""
        expected, bit = self._expected, replica.bit
        while (oldest := expected.oldest(bit)) is not None and (
            (replica.tells and now - oldest >= EXPECTED_SECONDS)
            or expected.num_expected(bit) > replica.capacity
            or expected.num_blocks > self._max_blocks
        ):
            expected.forget_oldest(bit)


def _count_told(told: set[bytes], block_hashes: Sequence[bytes]) -> int:
    """How many, counted from the first. Bisected, and only looked through where that was wrong."""
    low, high = 0, len(block_hashes)
    while low < high:
        middle = (low + high) // 2
        if block_hashes[middle] in told:
            low = middle + 1
        else:
            high = middle
    if told.issuperset(block_hashes[:low]):
        return low
    return next(number for number, block_hash in enumerate(block_hashes) if block_hash not in told)


def _bits(mask: int) -> bytes:
    """One byte a bit, 0 or 1, the lowest first: a hundred times faster to go through than the number itself."""
    return f"{mask:b}"[::-1].encode().translate(_BITS)
