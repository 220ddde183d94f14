"""TieredIndex: which engine has which KV cache blocks on its device, and which in host memory."""

from collections.abc import Sequence

from proa.contract import CheckpointRule
from proa_gateway.routing.hints import HashChain, RoutingHints
from proa_gateway.routing.index import PrefixIndex

HOST_HIT_WEIGHT = 0.8
"""What a block in host memory saves, of what one on the device does: 1 less the time of a load over that of computing
it. From 256 tokens on between 0.7 and 0.95, measured on a CPU and estimated for PCIe 5; see docs/kv-cache.md."""


class TieredIndex:
    """Two prefix indices of the same engines. Only the device's has pending blocks: what is computed is there first."""

    def __init__(self) -> None:
        self.device = PrefixIndex()
        self.host = PrefixIndex()

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
    ) -> None:
        """Add an engine with empty caches of these sizes. Replaces one of the same address."""
        self.remove_engine(address)
        self.device.add_replica(address, chain, num_blocks, rule)
        if num_host_blocks:
            self.host.add_replica(address, chain, num_host_blocks, rule)

    def remove_engine(self, address: str) -> None:
        """Remove an engine and its blocks. Unknown addresses are ignored."""
        self.device.remove_replica(address)
        self.host.remove_replica(address)

    def match(self, block_hashes: Sequence[bytes]) -> list[tuple[float, list[str]]]:
        """Return (length, addresses) pairs as `PrefixIndex.match` does. Blocks that an engine would load count as
        `HOST_HIT_WEIGHT` blocks each."""
        on_device = self.device.match(block_hashes)
        if not self.host.num_blocks:
            return [(float(length), addresses) for length, addresses in on_device]
        lengths = {address: float(length) for length, addresses in on_device for address in addresses}
        for length, addresses in self.host.match(block_hashes):
            for address in addresses:
                known = lengths.get(address, 0.0)
                lengths[address] = known + HOST_HIT_WEIGHT * max(length - known, 0.0)
        by_length: dict[float, list[str]] = {}
        for address, weighted in lengths.items():
            by_length.setdefault(weighted, []).append(address)
        return sorted(by_length.items(), reverse=True)

    def add_pending(self, address: str, hints: RoutingHints, now: float) -> int:
        """Record that a request is sent to the engine. Return how many leading blocks of the prompt it need not
        compute."""
        on_device = self.device.add_pending(address, hints, now)
        return max(on_device, self.host.count_cached(address, hints.reusable)) if self.host.num_blocks else on_device
