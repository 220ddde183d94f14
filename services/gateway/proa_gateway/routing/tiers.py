"""TieredIndex: which engine has which KV cache blocks on its device, and which in host memory."""

from collections.abc import Callable, Mapping, Sequence
from heapq import nsmallest

from proa.contract import CheckpointRule, ModelInfo, SchedulerStats
from proa_gateway.routing.hints import HashChain, RoutingHints
from proa_gateway.routing.index import PrefixIndex

HOST_HIT_WEIGHT = 0.8
"""What a block in host memory saves, of what one on the device does, until an engine has measured it. From 256 tokens
on between 0.7 and 0.95, measured on a CPU and estimated for PCIe 5; see docs/kv-cache.md."""
MAX_HOST_HIT_WEIGHT = 0.95
MAX_HOLDERS = 4


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
        if not self.host.num_blocks:
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
        return max(on_device, self.host.count_cached(address, hints.reusable)) if self.host.num_blocks else on_device
