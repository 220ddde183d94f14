"""TieredIndex: which engine has which KV cache blocks on its device, and which in host memory, each in a `PrefixIndex`.

A replica's blocks are confirmed (its engine's KV events reported them) or pending (a request was sent that will compute
them). A cache hit of a replica with a checkpoint rule ends at a checkpoint.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from heapq import nsmallest
from itertools import compress

from proa.contract import CheckpointRule, ModelInfo, SchedulerStats
from proa_gateway.routing.pending_blocks import PendingBlocks
from proa_gateway.routing.policies import HashChain, RoutingHints
from proa_gateway.routing.replicas import ReplicaBitmaps, ReplicaCheckpoints

MAX_BLOCKS = 1_000_000
"""Maximum number of distinct confirmed blocks over all replicas, evicted by least recent use (approximately), and of
distinct pending blocks, evicted by age. The same number of checkpoints."""

PENDING_TIMEOUT = 60.0
"""Seconds after which a pending request is dropped if its blocks were not confirmed. Covers the engine's queue. Not
applied to engines without KV events."""

HOST_HIT_WEIGHT = 0.8
"""What a block in host memory saves, of what one on the device does, until an engine has measured it. From 256 tokens
on between 0.7 and 0.95, measured on a CPU and estimated for PCIe 5; see docs/kv-cache.md."""
MAX_HOST_HIT_WEIGHT = 0.95
MAX_HOLDERS = 4
_BITS = bytes.maketrans(b"01", b"\0\1")


class _Replica:
    """One replica's part of the index. `confirmed` are its confirmed blocks, also found in the bitmaps."""

    __slots__ = ("bit", "capacity", "chain", "confirmed", "has_events")

    def __init__(self, bit: int, chain: HashChain, capacity: int) -> None:
        self.bit = bit
        self.chain = chain
        self.capacity = capacity  # blocks
        self.has_events = True  # False: the engine sends none, so its pending blocks have no timeout
        self.confirmed: set[bytes] = set()


class PrefixIndex:
    """Replicas are named by address. Memory is bounded: at most `max_blocks` confirmed blocks, as many pending ones and
    as many checkpoints."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._confirmed = ReplicaBitmaps(max_blocks)
        self._pending = PendingBlocks()
        self._checkpoints = ReplicaCheckpoints(max_blocks)
        self._replicas: dict[str, _Replica] = {}  # by address
        self._by_bit: list[_Replica | None] = []  # by bit number; None: the number is free
        self._addresses: list[str] = []  # by bit number

    @property
    def num_blocks(self) -> int:
        return len(self._confirmed) + self._pending.num_blocks

    @property
    def has_pending(self) -> bool:
        """Whether a replica with KV events has pending blocks or expected checkpoints."""
        bits = [one.bit for one in self._replicas.values() if one.has_events]
        return any(self._pending.num_pending(bit) or self._checkpoints.has_expected(bit) for bit in bits)

    @property
    def num_bytes(self) -> int:
        """Estimate of the memory in use, from container sizes; takes microseconds."""
        sets = sum([sys.getsizeof(replica.confirmed) for replica in self._replicas.values()])
        num_replicas = len(self._addresses)
        bitmaps = self._confirmed.num_bytes(num_replicas) + self._checkpoints.num_bytes(num_replicas)
        return sets + bitmaps + self._pending.num_bytes

    def add_replica(self, address: str, chain: HashChain, capacity: int, rule: CheckpointRule | None = None) -> None:
        """Add a replica with an empty prefix cache of `capacity` blocks. Replaces one of the same address."""
        self.remove_replica(address)
        number = self._by_bit.index(None) if None in self._by_bit else len(self._by_bit)
        replica = self._replicas[address] = _Replica(1 << number, chain, capacity)
        self._by_bit[number : number + 1] = [replica]
        self._addresses[number : number + 1] = [address]
        if rule is not None:
            self._checkpoints.add_replica(replica.bit, rule, chain)

    def remove_replica(self, address: str) -> None:
        """Remove a replica and its blocks. Unknown addresses are ignored."""
        replica = self._replicas.pop(address, None)
        if replica is not None:
            self._confirmed.remove(replica.bit, replica.confirmed)
            self._pending.remove_replica(replica.bit)
            self._checkpoints.remove_replica(replica.bit)
            self._by_bit[self._by_bit.index(replica)] = None

    def has_replica(self, address: str) -> bool:
        return address in self._replicas

    def disable_events(self, address: str) -> None:
        """The engine sends no KV events: its pending blocks have no timeout, only its capacity bounds them."""
        self._replicas[address].has_events = False

    def match(self, block_hashes: Sequence[bytes], *, pending: bool = True) -> list[tuple[int, list[str]]]:
        """Return (length, addresses) pairs: which replicas can reuse how many leading blocks of the prompt.

        Longest first; each replica once; replicas without any block left out. Assumes that a replica with a block has
        the blocks before it. The length is too large if an engine evicted an earlier block first (two requests
        computed it at the same time); `count_cached` is exact. `pending` False: only confirmed blocks count.
        """
        found = self._confirmed.match(block_hashes) + (self._pending.match(block_hashes) if pending else [])
        if self._checkpoints.replicas:
            found = self._checkpoints.shorten(found, block_hashes)
        matched: list[tuple[int, list[str]]] = []
        known = 0
        for length, replicas in sorted(found, reverse=True):
            if new := replicas & ~known:
                matched.append((length, list(compress(self._addresses, _bits(new)))))
                known |= new
        return matched

    def count_cached(self, address: str, block_hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of the prompt the replica can reuse."""
        replica = self._replicas.get(address)
        if replica is None:
            return 0
        return self._checkpoints.count_reusable(replica.bit, self._count_leading(replica, block_hashes), block_hashes)

    def count_confirmed(self, address: str, block_hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of the prompt the replica can reuse of those that its engine reported."""
        replica = self._replicas.get(address)
        if replica is None:
            return 0
        length = _count_leading(replica.confirmed, block_hashes)
        return self._checkpoints.count_reusable(replica.bit, length, block_hashes)

    def add_pending(self, address: str, hints: RoutingHints, now: float) -> int:
        """Record that a request is sent to the replica. Ignored if the replica's chain differs.

        Return how many leading blocks of the prompt the replica could reuse before.
        """
        replica, block_hashes = self._replicas.get(address), hints.block_hashes
        if replica is None or replica.chain != hints.chain:
            return 0
        bit, num_cached = replica.bit, self._count_leading(replica, block_hashes)
        num_reusable = length = min(num_cached, hints.num_reusable)
        if self._checkpoints.replicas:
            num_reusable = self._checkpoints.count_reusable(bit, length, block_hashes)
            self._checkpoints.expect(bit, num_reusable, length, hints, now)
        if num_cached < len(block_hashes) or not replica.confirmed.issuperset(block_hashes[-1:]):
            self._pending.add(bit, block_hashes, now)
        self._confirmed.touch(block_hashes[:num_cached])
        self._trim_pending(replica, now)
        return num_reusable

    def add_confirmed(self, address: str, block_hashes: Sequence[bytes]) -> None:
        """The replica's engine reported that it stored these blocks."""
        replica = self._replicas[address]
        replica.confirmed.update(block_hashes)
        self._confirmed.add(replica.bit, block_hashes)
        self._pending.confirm(replica.bit, block_hashes)
        for block_hash, bitmap in self._confirmed.evict():
            for owner in compress(self._by_bit, _bits(bitmap)):
                assert owner is not None
                owner.confirmed.discard(block_hash)

    def remove_confirmed(self, address: str, block_hashes: Sequence[bytes]) -> None:
        """The replica's engine reported that it evicted these blocks."""
        replica = self._replicas[address]
        removed = replica.confirmed.intersection(block_hashes)
        replica.confirmed -= removed
        self._confirmed.remove(replica.bit, removed)

    def add_checkpoints(self, address: str, checkpoints: Sequence[bytes]) -> None:
        """The replica's engine reported that it made these checkpoints."""
        self._checkpoints.confirm(self._replicas[address].bit, checkpoints)

    def remove_checkpoints(self, address: str, checkpoints: Sequence[bytes]) -> None:
        """The replica's engine reported that these checkpoints no longer exist."""
        self._checkpoints.remove_confirmed(self._replicas[address].bit, checkpoints)

    def clear_confirmed(self, address: str) -> None:
        """Drop the replica's confirmed blocks and checkpoints, because a snapshot follows. Pending blocks stay."""
        replica = self._replicas[address]
        self._confirmed.remove(replica.bit, replica.confirmed)
        replica.confirmed = set()
        self._checkpoints.clear_confirmed(replica.bit)

    def check_integrity(self) -> None:
        """For tests. Raises `AssertionError` if bitmaps and replicas disagree."""
        bitmaps: dict[bytes, int] = {}
        for replica in self._replicas.values():
            for block_hash in replica.confirmed:
                bitmaps[block_hash] = bitmaps.get(block_hash, 0) | replica.bit
        self._confirmed.check_integrity(bitmaps)
        self._pending.check_integrity()
        self._checkpoints.check_integrity()

    def _count_leading(self, replica: _Replica, block_hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of the prompt the replica has."""
        pending = [length for length, replicas in self._pending.match(block_hashes) if replicas & replica.bit]
        return max(_count_leading(replica.confirmed, block_hashes), *pending[-1:], 0)

    def _trim_pending(self, replica: _Replica, now: float) -> None:
        """Drop the replica's oldest pending requests that timed out or exceed its capacity or `max_blocks`, and
        expected checkpoints likewise."""
        pending, bit = self._pending, replica.bit
        while (sent_at := pending.oldest(bit)) is not None and (
            (replica.has_events and now - sent_at >= PENDING_TIMEOUT)
            or pending.num_pending(bit) > replica.capacity
            or pending.num_blocks > self._max_blocks
        ):
            pending.remove_oldest(bit)
        if self._checkpoints.replicas:
            timed_out = now - PENDING_TIMEOUT if replica.has_events else -math.inf
            self._checkpoints.remove_expected(bit, timed_out, replica.capacity)


def _count_leading(confirmed: set[bytes], block_hashes: Sequence[bytes]) -> int:
    """Return how many leading blocks are in the set: by bisection, then a linear search only if that was wrong."""
    low, high = 0, len(block_hashes)
    while low < high:
        middle = (low + high) // 2
        if block_hashes[middle] in confirmed:
            low = middle + 1
        else:
            high = middle
    if confirmed.issuperset(block_hashes[:low]):
        return low
    return next(number for number, block_hash in enumerate(block_hashes) if block_hash not in confirmed)


def _bits(bitmap: int) -> bytes:
    """Return the bits as bytes 0 and 1, lowest first. `compress` reads these 100 times faster than shifting the int."""
    return f"{bitmap:b}"[::-1].encode().translate(_BITS)


def host_hit_weight(model: ModelInfo, stats: SchedulerStats) -> float:
    """Return what a block in the engine's host memory saves, of what one on the device does: 1 less the time of a load
    over that of computing it. `HOST_HIT_WEIGHT` while a rate is not known."""
    transfer, load_rate, prefill_rate = model.kv_transfer, stats.load_bytes_per_second, stats.prefill_tokens_per_second
    if transfer is None or not load_rate or not prefill_rate:
        return HOST_HIT_WEIGHT
    load, prefill = transfer.block_bytes / load_rate, model.block_size / prefill_rate
    return min(max(1 - load / prefill, 0.0), MAX_HOST_HIT_WEIGHT)


class TieredIndex:
    """Two prefix indices of the same engines. Only the device's has pending blocks: what is computed is there first."""

    def __init__(self) -> None:
        self.device = PrefixIndex()
        self.host = PrefixIndex()
        self._host_weights: dict[str, Callable[[], float]] = {}  # by address

    @property
    def num_blocks(self) -> int:
        return self.device.num_blocks + self.host.num_blocks

    @property
    def num_bytes(self) -> int:
        """Estimate of the memory in use."""
        return self.device.num_bytes + self.host.num_bytes

    def add_engine(
        self,
        address: str,
        chain: HashChain,
        num_blocks: int,
        num_host_blocks: int = 0,
        rule: CheckpointRule | None = None,
        host_weight: Callable[[], float] = lambda: HOST_HIT_WEIGHT,
    ) -> None:
        """Add an engine with empty caches of these sizes. Replaces one of the same address. `host_weight` returns its
        `host_hit_weight`."""
        self.remove_engine(address)
        self.device.add_replica(address, chain, num_blocks, rule)
        if num_host_blocks:
            self.host.add_replica(address, chain, num_host_blocks, rule)
            self._host_weights[address] = host_weight

    def remove_engine(self, address: str) -> None:
        """Remove an engine and its blocks. Unknown addresses are ignored."""
        self.device.remove_replica(address)
        self.host.remove_replica(address)
        self._host_weights.pop(address, None)

    def match(self, block_hashes: Sequence[bytes]) -> list[tuple[float, list[str]]]:
        """Return (length, addresses) pairs as `PrefixIndex.match` does. Blocks that an engine would load count as
        `host_hit_weight` blocks each."""
        on_device = self.device.match(block_hashes)
        if not self._host_weights:
            return [(float(length), addresses) for length, addresses in on_device]
        lengths = {address: float(length) for length, addresses in on_device for address in addresses}
        for length, addresses in self.host.match(block_hashes):
            for address in addresses:
                known = lengths.get(address, 0.0)
                if length > known:
                    lengths[address] = known + self._host_weights[address]() * (length - known)
        by_length: dict[float, list[str]] = {}
        for address, weighted in lengths.items():
            by_length.setdefault(weighted, []).append(address)
        return sorted(by_length.items(), reverse=True)

    def holders(self, block_hashes: Sequence[bytes], among: Mapping[str, float], more_than: int) -> dict[str, int]:
        """Return how many leading blocks of the prompt engines hold in either tier, exactly, by address.

        These are the `MAX_HOLDERS` of the engines `among` that hold most, and more than `more_than`; between equal ones
        those with the lowest cost, which is the mapping's value. Pending blocks do not count.
        """
        lengths: dict[str, int] = {}
        for tier in (self.device, self.host):
            for length, addresses in tier.match(block_hashes, pending=False):
                if length > more_than:
                    lengths |= {one: max(length, lengths.get(one, 0)) for one in addresses if one in among}
        best = nsmallest(MAX_HOLDERS, lengths, key=lambda one: (-lengths[one], among[one]))
        tiers = self.device, self.host
        exact = {one: max(tier.count_confirmed(one, block_hashes) for tier in tiers) for one in best}
        return {one: length for one, length in exact.items() if length > more_than}

    def add_pending(self, address: str, hints: RoutingHints, now: float) -> int:
        """Record that a request is sent to the engine. Return how many leading blocks of the prompt it need not
        compute."""
        on_device = self.device.add_pending(address, hints, now)
        return max(on_device, self.host.count_cached(address, hints.reusable)) if self._host_weights else on_device
