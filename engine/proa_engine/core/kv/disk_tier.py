"""DiskTier: which blocks and checkpoints the mover has on disk, and which it is asked to write.

A prefix is written when a request loads a part of it from host memory, which is its second use. So prompts that are
sent once are never written. With a threshold of more uses almost nothing would be written, because few prefixes stay in
host memory that long.

The sets of blocks and checkpoints are hints. The mover reads what is on disk, and a request computes the rest.
"""

from collections.abc import Collection, Sequence

from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.kv.host_tier import HostTier
from proa_engine.core.kv.mover import DiskChanges, Mover
from proa_engine.core.request import Request, RequestStatus
from proa_engine.core.types import DiskCounts, DiskOccupancy, FetchCounts


class DiskTier:
    """The disk of an engine. Used on the core's thread only."""

    def __init__(self, host: HostTier, mover: Mover, groups: CacheGroups) -> None:
        self.blocks: set[bytes] = set()  # of table 0
        self.checkpoints: set[bytes] = set()
        self.counts = DiskCounts()
        self._host = host
        self._mover = mover
        self._block_size = groups.block_size
        self._needs_checkpoint = groups.has_checkpoints

    def take(self, changes: DiskChanges) -> None:
        """Apply a report of the mover."""
        changes.blocks.apply(self.blocks)
        changes.checkpoints.apply(self.checkpoints)
        self.counts = changes.counts

    def extent(self, block_hashes: Sequence[bytes], num_held: int) -> int:
        """Return how many of a prefix's leading blocks a request can use if those behind the first `num_held` are read
        from disk, as far as they are there."""
        end = num_held
        while end < len(block_hashes) and block_hashes[end] in self.blocks:
            end += 1
        if self._needs_checkpoint:
            return next((n for n in range(end, 0, -1) if block_hashes[n - 1] in self.checkpoints), 0)
        return end

    def keep(self, request: Request, num_tokens: int) -> None:
        """Have the request's first `num_tokens` tokens written, a part of which it loads from host memory, as far as
        that has them.

        Nothing is written for a request that loads blocks that it has computed or fetched itself, which is no second
        use, nor for one with a `cache_salt`, whose blocks other requests cannot find.
        """
        if request.has_cache_salt or request.fetch or request.status is RequestStatus.PREEMPTED:
            return
        block_hashes = request.block_hashes[: num_tokens // self._block_size]
        cached, missing = self._host.pools.cache.cached_blocks, list[bytes]()
        is_whole = True
        for block_hash in block_hashes:
            if block_hash in self.blocks:
                continue
            if block_hash not in cached:
                is_whole = False
                break
            missing.append(block_hash)
        checkpoint = b""
        if is_whole and self._needs_checkpoint and block_hashes[-1] in self._host.pools.cache.checkpoints:
            checkpoint = b"" if block_hashes[-1] in self.checkpoints else block_hashes[-1]
        if missing or checkpoint:
            self._mover.write(missing, checkpoint, self._host.serial)

    def reset(self) -> None:
        """Forget everything. The mover does the same when it is reset."""
        self.blocks.clear()
        self.checkpoints.clear()

    def occupancy(self, reads: FetchCounts) -> DiskOccupancy:
        """What is on disk now. From any thread, because only lengths are read. `reads`: those of `Fetches`."""
        return DiskOccupancy(len(self.blocks), self.counts, reads)


class NoDiskTier:
    """An engine without a disk for its cache."""

    blocks: Collection[bytes] = ()

    def take(self, changes: DiskChanges) -> None:
        raise AssertionError("only a disk changes")

    def extent(self, block_hashes: Sequence[bytes], num_held: int) -> int:
        return 0

    def keep(self, request: Request, num_tokens: int) -> None: ...

    def reset(self) -> None: ...

    def occupancy(self, reads: FetchCounts) -> None: ...
