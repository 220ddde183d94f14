"""PrefixIndex: which replica holds which KV cache blocks, as far as the gateway can know. Knows no loads and no policy.

Each block's hash maps to one integer with a bit for each replica that holds it, so that one walk along a prompt's
hashes, ANDing as it goes, finds the longest held prefix of every replica: 512 look-ups for 8k tokens, however many
replicas there are. Blocks are known from an engine's own events, or expected, because a request was sent that will
compute them. A replica's blocks are kept in the order of their last use, as the engine keeps them.
"""

import math
import sys
from collections import deque
from collections.abc import Collection, Sequence
from itertools import islice

from proa_gateway.types import BlockChain

MAX_BLOCKS = 2_000_000
"""Blocks times replicas that hold them. One takes about 200 bytes, so all take 400 MB at most."""

EXPECTED_SECONDS = 30.0
"""How long an engine that tells its blocks may take to tell one that is expected; a request may wait in its queue."""

_KNOWN = math.inf
_KEY_BYTES = 64  # a hash as Python object, as the allocator rounds it


class _Replica:
    """One replica's part. `held` is ordered by last use; values say until when a block is expected, if not known."""

    __slots__ = ("bit", "capacity", "chain", "expected", "held", "tells")

    def __init__(self, bit: int, chain: BlockChain, capacity: int) -> None:
        self.bit = bit
        self.chain = chain
        self.capacity = capacity
        self.tells = True  # its blocks, by events
        self.held: dict[bytes, float] = {}
        self.expected: deque[tuple[float, Sequence[bytes]]] = deque()


class PrefixIndex:
    """Bounded: a replica has no more blocks here than its engine has, and all together no more than `max_blocks`."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.num_blocks = 0  # times replicas
        self._max_blocks = max_blocks
        self._masks: dict[bytes, int] = {}
        self._replicas: dict[str, _Replica] = {}
        self._addresses: list[str | None] = []  # by the number of the bit

    @property
    def num_bytes(self) -> int:
        """Memory in use, from the sizes of the containers and of what they hold; takes microseconds."""
        mask_bytes = sys.getsizeof(1 << max(0, len(self._addresses) - 1))
        tables = sys.getsizeof(self._masks) + sum(sys.getsizeof(replica.held) for replica in self._replicas.values())
        return tables + len(self._masks) * (_KEY_BYTES + mask_bytes)

    def add(self, address: str, chain: BlockChain, capacity: int) -> None:
        """A replica from now on, with room for so many blocks, of which it holds none yet."""
        self.remove(address)
        number = self._addresses.index(None) if None in self._addresses else len(self._addresses)
        self._addresses[number : number + 1] = [address]
        self._replicas[address] = _Replica(1 << number, chain, capacity)

    def remove(self, address: str) -> None:
        """A replica is gone, and what it held with it. Unknown ones are ignored."""
        replica = self._replicas.get(address)
        if replica is not None:
            self._drop(replica, list(replica.held))
            del self._replicas[address]
            self._addresses[self._addresses.index(address)] = None

    def cannot_tell(self, address: str) -> None:
        """A replica whose engine sends no events: what is expected of it counts until its cache must be full."""
        self._replicas[address].tells = False

    def match(self, block_hashes: Sequence[bytes]) -> dict[str, int]:
        """How many of the blocks, counted from the first, each replica holds; those that hold none are left out."""
        addresses, masks = self._addresses, self._masks
        matched: dict[str, int] = {}
        holders = (1 << len(addresses)) - 1
        for count, block_hash in enumerate((*block_hashes, b"")):  # nobody holds what comes after the last
            still = holders & masks.get(block_hash, 0)
            if still != holders:
                dropped = holders ^ still
                holders = still
                if count:
                    while dropped:
                        number = dropped.bit_length() - 1
                        dropped ^= 1 << number
                        address = addresses[number]
                        if address is not None:
                            matched[address] = count
                if not still:
                    break
        return matched

    def expect(self, address: str, chain: BlockChain, block_hashes: Sequence[bytes], now: float) -> None:
        """A request with these blocks is being sent to the replica. Blocks of another chain say nothing there."""
        replica = self._replicas.get(address)
        if replica is None or replica.chain != chain:
            return
        self._expire(replica, now)
        until = now + EXPECTED_SECONDS if replica.tells else _KNOWN
        held, masks, bit = replica.held, self._masks, replica.bit
        before = len(held)
        # The last block first: of what one request used, the tail is to go before the head.
        for block_hash in reversed(block_hashes):
            known = held.pop(block_hash, None)
            if known is None:
                others = masks.get(block_hash)
                masks[block_hash] = bit if others is None else others | bit
            held[block_hash] = _KNOWN if known == _KNOWN else until
        self.num_blocks += len(held) - before
        if replica.tells:
            replica.expected.append((until, block_hashes))
        self._trim(replica)

    def stored(self, address: str, block_hashes: Sequence[bytes]) -> None:
        """The replica's engine says that it holds these blocks."""
        replica = self._replicas[address]
        held, masks, bit = replica.held, self._masks, replica.bit
        before = len(held)
        for block_hash in reversed(block_hashes):
            if block_hash not in held:
                others = masks.get(block_hash)
                masks[block_hash] = bit if others is None else others | bit
            held[block_hash] = _KNOWN
        self.num_blocks += len(held) - before
        self._trim(replica)

    def removed(self, address: str, block_hashes: Sequence[bytes]) -> None:
        """The replica's engine says that it holds these blocks no longer."""
        replica = self._replicas[address]
        self._drop(replica, [block_hash for block_hash in block_hashes if block_hash in replica.held])

    def void(self, address: str) -> None:
        """What was known of the replica is known no longer; what is expected still is."""
        replica = self._replicas[address]
        self._drop(replica, [block_hash for block_hash, until in replica.held.items() if until == _KNOWN])

    def check_integrity(self) -> None:
        """Raises `AssertionError` where masks and replicas disagree. For tests."""
        masks: dict[bytes, int] = {}
        for replica in self._replicas.values():
            for block_hash in replica.held:
                masks[block_hash] = masks.get(block_hash, 0) | replica.bit
            assert len(replica.held) <= replica.capacity
        assert masks == self._masks
        assert self.num_blocks == sum(len(replica.held) for replica in self._replicas.values()) <= self._max_blocks

    def _expire(self, replica: _Replica, now: float) -> None:
        """Forget what was expected and never told."""
        while replica.expected and replica.expected[0][0] <= now:
            until, block_hashes = replica.expected.popleft()
            self._drop(replica, [block_hash for block_hash in block_hashes if replica.held.get(block_hash) == until])

    def _trim(self, replica: _Replica) -> None:
        """Keep the bounds: by forgetting what the replica used longest ago, and where all together are too many, what
        the one with the most blocks did."""
        self._drop_oldest(replica, len(replica.held) - replica.capacity)
        while self.num_blocks > self._max_blocks:
            largest = max(self._replicas.values(), key=lambda other: len(other.held))
            self._drop_oldest(largest, self.num_blocks - self._max_blocks)

    def _drop_oldest(self, replica: _Replica, count: int) -> None:
        if count > 0:
            self._drop(replica, list(islice(replica.held, count)))

    def _drop(self, replica: _Replica, block_hashes: Collection[bytes]) -> None:
        """Takes back what the replica holds; all of the blocks are."""
        held, masks, bit = replica.held, self._masks, replica.bit
        for block_hash in block_hashes:
            del held[block_hash]
            others = masks[block_hash] ^ bit
            if others:
                masks[block_hash] = others
            else:
                del masks[block_hash]
        self.num_blocks -= len(block_hashes)
