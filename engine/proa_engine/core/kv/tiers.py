"""Tiers: where blocks are beside the device, and the ways by which they come from there.

```
device ⇄ host.stores, host.loads ⇄ host memory ⇄ fetches, disk ⇄ disk, other engines
         copies of a step                        the mover, in its own time
```
"""

from collections.abc import Sequence
from dataclasses import dataclass

from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.kv.disk_tier import DiskTier, NoDiskTier
from proa_engine.core.kv.fetches import Fetches, NoFetches
from proa_engine.core.kv.host_tier import HostTier, HostTierConfig
from proa_engine.core.kv.mover import Mover
from proa_engine.core.kv.no_host_tier import NoHostTier
from proa_engine.core.kv.pools import Pools
from proa_engine.core.kv.prefix_cache import BlockHashes
from proa_engine.core.request import Request
from proa_engine.core.types import Block


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers of an engine. One that it does not have does nothing, so that no user of the tiers asks which ones
    there are."""

    host: HostTier | NoHostTier
    fetches: Fetches | NoFetches
    disk: DiskTier | NoDiskTier

    @classmethod
    def of(
        cls,
        config: HostTierConfig,
        groups: CacheGroups,
        hashes: BlockHashes,
        device: Pools,
        mover: Mover | None,
        *,
        has_disk: bool,
        has_sources: bool,
    ) -> "Tiers":
        """`mover` None: nothing is fetched. `has_disk`: the mover has a disk. `has_sources`: it fetches from the
        engines that requests name."""
        host = HostTier(config, groups, hashes, device)
        if mover is None:
            return cls(host, NoFetches(), NoDiskTier())
        disk = DiskTier(host, mover, groups) if has_disk else NoDiskTier()
        return cls(host, Fetches(host, disk, mover, groups, hashes, has_sources=has_sources), disk)

    def reset(self, since: float) -> None:
        """Forget everything, as after a change of weights at `since`, in Unix seconds."""
        self.host.reset()
        self.fetches.reset(since)

    def check_integrity(self, pending: Sequence[Request]) -> tuple[Sequence[Block], Sequence[Block]]:
        """Raises `AssertionError` if the tiers are inconsistent, or a request that is not in `pending` waits for a
        fetch. Returns the device's blocks and states that loads reference, once for each load."""
        return self.host.check_integrity(self.fetches.check_integrity(pending))


NO_TIERS = Tiers(NoHostTier(), NoFetches(), NoDiskTier())
