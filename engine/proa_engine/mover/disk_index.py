"""DiskIndex: where the units of the KV cache are in a folder's segments, and which checkpoints are whole.

It is in memory alone: `Segments` reads the records of an earlier process into it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

from proa_engine.core.kv_events import KvChanges
from proa_engine.mover.disk_records import CheckpointRecord
from proa_engine.mover.index import STATE, Key


class Place(NamedTuple):
    """Where a unit is."""

    segment: int
    offset: int
    length: int
    checksum: int


class DiskCheckpoint(NamedTuple):
    """A checkpoint, and the segment that has its record."""

    segment: int
    record: CheckpointRecord

    @property
    def keys(self) -> list[Key]:
        """Return the units that it consists of: its tails, then its state."""
        keys = [(table, block_hash) for table, tail in enumerate(self.record.tails, start=1) for block_hash in tail]
        return [*keys, (STATE, self.record.block_hash)] if self.record.has_state else keys


@dataclass(slots=True, eq=False)
class Segment:
    """A pair of files, and what was written to it: units and checkpoints that may be elsewhere by now."""

    number: int
    data_bytes: int = 0
    index_bytes: int = 0
    keys: list[Key] = field(default_factory=list)
    checkpoints: list[bytes] = field(default_factory=list)


class DiskIndex:
    """Any thread may call any method. Only the thread that writes adds and forgets segments' content."""

    def __init__(self) -> None:
        self._lock = Lock()  # of all that follows
        self._units: dict[Key, Place] = {}
        self._checkpoints: dict[bytes, DiskCheckpoint] = {}
        self._needed: dict[Key, set[bytes]] = {}  # checkpoints that need the unit
        self._were_read: set[Key] = set()  # units, since they were written
        self._num_resets = self._num_cleared = 0
        self._blocks_changed, self._checkpoints_changed = KvChanges.snapshot(), KvChanges.snapshot()

    def find(self, key: Key) -> Place | None:
        """Return where a unit is, None if it is not there."""
        with self._lock:
            return self._units.get(key)

    def find_checkpoint(self, block_hash: bytes) -> DiskCheckpoint | None:
        """Return the checkpoint at the end of this block, all of whose units are there."""
        with self._lock:
            return self._checkpoints.get(block_hash)

    def is_whole(self, record: CheckpointRecord) -> bool:
        """Whether all units of a checkpoint are there."""
        with self._lock:
            return self._has_units(DiskCheckpoint(0, record))

    def note_read(self, key: Key, place: Place) -> None:
        """Note that a unit was read, if it is still at this place."""
        with self._lock:
            if self._units.get(key) == place:
                self._were_read.add(key)

    def units_read(self, segment: Segment) -> Iterator[tuple[Key, Place, list[CheckpointRecord]]]:
        """Yield the segment's units that were read since they were written, each with the checkpoints that need it."""
        for key in segment.keys:
            with self._lock:
                place = self._units.get(key) if key in self._were_read else None
                needed_by = [self._checkpoints[block_hash].record for block_hash in self._needed.get(key, ())]
            if place is not None and place.segment == segment.number:
                yield key, place, needed_by

    def add(self, segment: Segment, key: Key, place: Place) -> None:
        """Let a unit of the segment be found, unless all is forgotten and `finish_reset` was not called yet."""
        with self._lock:
            if self._num_resets != self._num_cleared:
                return
            if key[0] == 0 and key not in self._units:
                self._blocks_changed.store(key[1])
            self._units[key] = place
            segment.keys.append(key)

    def add_checkpoint(self, segment: Segment, record: CheckpointRecord) -> None:
        """Let a checkpoint be found whose record is in the segment, if all of its units are there."""
        checkpoint = DiskCheckpoint(segment.number, record)
        with self._lock:
            if self._num_resets != self._num_cleared or not self._has_units(checkpoint):
                return
            if record.block_hash not in self._checkpoints:
                self._checkpoints_changed.store(record.block_hash)
            self._checkpoints[record.block_hash] = checkpoint
            segment.checkpoints.append(record.block_hash)
            for key in checkpoint.keys:
                self._needed.setdefault(key, set()).add(record.block_hash)

    def remove(self, key: Key, place: Place) -> None:
        """Find a unit no longer, nor the checkpoints that need it, if it is still at this place."""
        with self._lock:
            if self._units.get(key) == place:
                self._forget(key)

    def forget(self, segment: Segment) -> None:
        """Find no longer what is in this segment."""
        with self._lock:
            for key in segment.keys:
                place = self._units.get(key)
                if place is not None and place.segment == segment.number:
                    self._forget(key)
            for block_hash in segment.checkpoints:
                checkpoint = self._checkpoints.get(block_hash)
                if checkpoint is not None and checkpoint.segment == segment.number:
                    self._forget_checkpoint(block_hash)

    def reset(self) -> None:
        """Find nothing that was added before, nor what is added before `finish_reset`."""
        with self._lock:
            self._num_resets += 1
            self._units, self._checkpoints, self._needed, self._were_read = {}, {}, {}, set()
            self._blocks_changed, self._checkpoints_changed = KvChanges.snapshot(), KvChanges.snapshot()

    @property
    def num_resets(self) -> int:
        """How many resets there were: the argument of `finish_reset`, read before the segments are deleted."""
        return self._num_resets

    def finish_reset(self, num_resets: int) -> None:
        """Add what is written again, unless there was a later reset."""
        with self._lock:
            self._num_cleared = num_resets

    def take_changes(self) -> tuple[KvChanges, KvChanges]:
        """Return the changes, since the last call, of what is found: blocks of table 0, and checkpoints. The first ones
        are snapshots."""
        with self._lock:
            changes = self._blocks_changed, self._checkpoints_changed
            self._blocks_changed, self._checkpoints_changed = KvChanges(), KvChanges()
            return changes

    def _has_units(self, checkpoint: DiskCheckpoint) -> bool:
        return all(key in self._units for key in checkpoint.keys)

    def _forget(self, key: Key) -> None:
        del self._units[key]
        self._were_read.discard(key)
        if key[0] == 0:
            self._blocks_changed.remove(key[1])
        for block_hash in self._needed.pop(key, ()):
            self._forget_checkpoint(block_hash)

    def _forget_checkpoint(self, block_hash: bytes) -> None:
        for key in self._checkpoints.pop(block_hash).keys:
            if (needed_by := self._needed.get(key)) is not None:
                needed_by.discard(block_hash)
                if not needed_by:
                    del self._needed[key]
        self._checkpoints_changed.remove(block_hash)
