"""DiskRanks: what the disks of all ranks have in common."""

from collections.abc import Sequence
from dataclasses import fields

from proa_engine.core.kv.mover import DiskChanges
from proa_engine.core.kv_events import KvChanges
from proa_engine.core.types import DiskCounts


class _Common:
    """The hashes that every rank has."""

    def __init__(self, num_ranks: int) -> None:
        self._of_ranks: list[set[bytes]] = [set() for _ in range(num_ranks)]
        self._common: set[bytes] = set()

    def apply(self, rank: int, changes: KvChanges) -> KvChanges:
        """Apply changes of a rank. Returns those of what all ranks have."""
        own = self._of_ranks[rank]
        touched = {*changes.stored, *changes.removed, *(own if changes.is_snapshot else ())}
        changes.apply(own)
        merged = KvChanges()
        for block_hash in touched:
            is_common = all(block_hash in hashes for hashes in self._of_ranks)
            if is_common and block_hash not in self._common:
                self._common.add(block_hash)
                merged.store(block_hash)
            elif not is_common and block_hash in self._common:
                self._common.discard(block_hash)
                merged.remove(block_hash)
        return merged


class DiskRanks:
    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._blocks, self._checkpoints = _Common(num_ranks), _Common(num_ranks)
        self._counts = [DiskCounts()] * num_ranks

    def take(self, rank: int, changes: DiskChanges) -> DiskChanges:
        """Take changes of a rank. Returns those of what all ranks have, and the sums of their counts."""
        self._counts[rank] = changes.counts
        if self._num_ranks == 1:
            return changes
        return DiskChanges(
            blocks=self._blocks.apply(rank, changes.blocks),
            checkpoints=self._checkpoints.apply(rank, changes.checkpoints),
            counts=_sum(self._counts),
        )


def _sum(counts: Sequence[DiskCounts]) -> DiskCounts:
    return DiskCounts(**{each.name: sum(getattr(of, each.name) for of in counts) for each in fields(DiskCounts)})
