"""PrefixIndex: which replica holds which KV cache blocks, as far as the gateway can know. Knows no loads and no policy.

Each block's hash maps to one integer with a bit for each replica that holds it, so one look-up says of all replicas
whether they hold a block. An engine gives away the tail of a prompt before its head, so where a replica's part ends is
found by bisection. A replica's blocks are told by its engine's events, or expected, because a request was sent that
will compute them. What is done to many blocks is done by containers where that can be: a loop takes ten times as long.
"""

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, repeat

from proa_gateway.types import BlockChain

MAX_BLOCKS = 1_000_000
"""Blocks with a content of their own, whoever holds them. Those that were used longest ago go first."""

EXPECTED_SECONDS = 60.0
"""How long an engine that tells its blocks may take to tell one that is expected; a request may wait in its queue."""

_BITS = bytes.maketrans(b"01", b"\0\1")
_LISTED_BYTES = 8 + 64  # a pointer, and a hash that the masks hold as another object
_KEY_BYTES = 64  # a hash as Python object, as the allocator rounds it


class _Replica:
    """One replica's part of the index. No block is both told and expected; its bit is set for either."""

    __slots__ = ("bit", "capacity", "chain", "expectations", "expected", "num_listed", "tells", "told")

    def __init__(self, bit: int, chain: BlockChain, capacity: int) -> None:
        self.bit = bit
        self.chain = chain
        self.capacity = capacity  # in blocks
        self.tells = True
        self.told: set[bytes] = set()
        self.expected: dict[bytes, float] = {}  # when last
        self.expectations: deque[tuple[float, Sequence[bytes]]] = deque()  # when, and what; oldest first
        self.num_listed = 0  # blocks in all of these


class PrefixIndex:
    """Of replicas by address. Holds no more than `max_blocks` blocks, whatever comes."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        # Two generations instead of an exact order of use, which would cost more than all the rest: what is used is
        # kept among the young; the old ones are given up one by one, and when none is left, the young are the old.
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._next_to_go: Iterator[bytes] = iter(())
        self._replicas: dict[str, _Replica] = {}
        self._by_number: list[_Replica | None] = []  # the number of the bit
        self._addresses: list[str] = []

    @property
    def num_blocks(self) -> int:
        return len(self._young) + len(self._old)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is expected of an engine that would tell it."""
        return not any(replica.expected for replica in self._replicas.values() if replica.tells)

    @property
    def num_bytes(self) -> int:
        """Memory in use, from the sizes of the containers and of what is in them; takes microseconds."""
        mask_bytes = sys.getsizeof(1 << max(0, len(self._addresses) - 1))
        total = sys.getsizeof(self._young) + sys.getsizeof(self._old) + self.num_blocks * (_KEY_BYTES + mask_bytes)
        for replica in self._replicas.values():
            total += sys.getsizeof(replica.told) + sys.getsizeof(replica.expected)
            total += replica.num_listed * _LISTED_BYTES
        return total

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
            self._clear(replica.bit, replica.told)
            self._clear(replica.bit, replica.expected)
            self._by_number[self._by_number.index(replica)] = None

    def cannot_tell(self, address: str) -> None:
        """The replica's engine sends no events: what is expected of it counts until its cache must be full."""
        self._replicas[address].tells = False

    def match(self, block_hashes: Sequence[bytes]) -> dict[str, int]:
        """How many of the blocks, counted from the first, each replica holds; those that hold none are left out.

        Takes it that who holds a block holds those before it. Where an engine gave one of these away first, because
        two requests computed it at the same time, the number is too large; `count` is exact.
        """
        young, old = self._young.get, self._old.get
        matched: dict[str, int] = {}
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
            matched.update(zip(compress(self._addresses, _bits(holders)), repeat(low + 1), strict=False))
        return matched

    def count(self, address: str, block_hashes: Sequence[bytes]) -> int:
        """How many of the blocks, counted from the first, the replica holds."""
        replica = self._replicas.get(address)
        if replica is None:
            return 0
        told, expected = replica.told, replica.expected
        missing = [block_hash for block_hash in block_hashes if block_hash not in told and block_hash not in expected]
        return block_hashes.index(missing[0]) if missing else len(block_hashes)

    def expect(self, address: str, chain: BlockChain, block_hashes: Sequence[bytes], now: float) -> None:
        """A request with these blocks is sent to the replica. Blocks of another chain mean nothing there."""
        replica = self._replicas.get(address)
        if replica is None or replica.chain != chain:
            return
        told = replica.told
        fresh = [block_hash for block_hash in block_hashes if block_hash not in told]
        if fresh:
            self._set(replica.bit, fresh)
            replica.expected.update(dict.fromkeys(fresh, now))
            replica.expectations.append((now, fresh))
            replica.num_listed += len(fresh)
        self._keep(block_hashes)
        self._forget_expected(replica, now)
        self._trim()

    def stored(self, address: str, block_hashes: Sequence[bytes]) -> None:
        """The replica's engine says that it holds these blocks."""
        replica = self._replicas[address]
        if replica.expected:
            for block_hash in block_hashes:
                replica.expected.pop(block_hash, None)
        replica.told.update(block_hashes)
        self._set(replica.bit, block_hashes)
        self._trim()

    def removed(self, address: str, block_hashes: Sequence[bytes]) -> None:
        """The replica's engine says that it no longer holds these blocks."""
        replica = self._replicas[address]
        gone = replica.told.intersection(block_hashes)
        replica.told -= gone
        self._clear(replica.bit, gone)

    def void(self, address: str) -> None:
        """What the replica's engine has told means nothing now; what is expected still does."""
        replica = self._replicas[address]
        self._clear(replica.bit, replica.told)
        replica.told = set()

    def check_integrity(self) -> None:
        """Raises `AssertionError` where masks and replicas disagree. For tests."""
        masks: dict[bytes, int] = {}
        for replica in self._replicas.values():
            assert replica.told.isdisjoint(replica.expected)
            for block_hash in (*replica.told, *replica.expected):
                masks[block_hash] = masks.get(block_hash, 0) | replica.bit
        assert self._young.keys().isdisjoint(self._old)
        assert masks == self._young | self._old
        assert len(masks) <= self._max_blocks

    def _keep(self, block_hashes: Sequence[bytes]) -> None:
        """These are used: none of them is old."""
        if self._old:
            for block_hash in self._old.keys() & block_hashes:
                self._young[block_hash] = self._old.pop(block_hash)

    def _set(self, bit: int, block_hashes: Sequence[bytes]) -> None:
        young, old = self._young, self._old
        if young.keys().isdisjoint(block_hashes) and old.keys().isdisjoint(block_hashes):
            young.update(dict.fromkeys(block_hashes, bit))
            return
        for block_hash in block_hashes:
            young[block_hash] = (young.get(block_hash) or old.pop(block_hash, 0)) | bit

    def _clear(self, bit: int, block_hashes: Iterable[bytes]) -> None:
        """The bit of all of these is set."""
        young, old = self._young, self._old
        for block_hash in block_hashes:
            masks = young if block_hash in young else old
            mask = masks[block_hash] ^ bit
            if mask:
                masks[block_hash] = mask
            else:
                del masks[block_hash]

    def _forget_expected(self, replica: _Replica, now: float) -> None:
        """What was not told in time, by an engine that tells; of another, what exceeds its cache, oldest first."""
        expected, expectations = replica.expected, replica.expectations
        while expectations:
            when, block_hashes = expectations[0]
            is_over = now - when >= EXPECTED_SECONDS if replica.tells else len(expected) > replica.capacity
            # Of what has been told since then nothing is left here, and what was expected again has a later time.
            gone = [block_hash for block_hash in block_hashes if expected.get(block_hash) == when]
            if gone and not is_over and replica.num_listed <= 2 * replica.capacity:
                return
            expectations.popleft()
            replica.num_listed -= len(block_hashes)
            self._clear(replica.bit, gone)
            for block_hash in gone:
                del expected[block_hash]

    def _trim(self) -> None:
        while self.num_blocks > self._max_blocks:
            if not self._old:
                self._old, self._young = self._young, {}
                self._next_to_go = iter(list(self._old))
            mask = self._old.pop(block_hash := next(self._next_to_go), 0)  # 0: it is young again, or gone
            for replica in compress(self._by_number, _bits(mask)):
                assert replica is not None
                replica.told.discard(block_hash)
                replica.expected.pop(block_hash, None)


def _bits(mask: int) -> bytes:
    """One byte a bit, 0 or 1, the lowest first: a hundred times faster to go through than the number itself."""
    return f"{mask:b}"[::-1].encode().translate(_BITS)
