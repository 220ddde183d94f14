"""Segments: units of the KV cache in a folder, in a log of files of limited size, and an index of them in memory.

A segment has a data file, units one behind the other, and an index file, to which a record is appended when a unit is
written. A footer at the end of one file would lose all units of a segment, hours of writing, when the process is
killed; this loses the unit that is being written. Nothing is synchronized before it is used: a record or a unit that a
crash of the machine has lost has a wrong checksum.

The oldest segment is deleted when there are too many bytes.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from proa_engine.core.kv_events import KvChanges
from proa_engine.mover.disk_records import MAGIC, CheckpointRecord, UnitRecord, decode_records, encode_record
from proa_engine.mover.index import STATE, Key

_SYNC_BYTES = 8 << 20  # of data, after which the kernel writes them and frees their memory
_DISCARD = "discard"  # a file that says that the folder's content must not be used

Write = Callable[[int, Sequence[bytes | memoryview], int], int]  # as `os.pwritev`


class Damaged(ValueError):
    """What a file has is not what was written to it."""


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


class Kept(NamedTuple):
    """What was read of a segment that is deleted."""

    units: list[tuple[Key, memoryview, int]]  # content and checksum
    checkpoints: list[CheckpointRecord]  # that need any of the units


@dataclass(slots=True, eq=False)
class _Segment:
    number: int
    data_bytes: int = 0
    index_bytes: int = 0
    keys: list[Key] = field(default_factory=list)
    checkpoints: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class _Active:
    """The segment that is written, with its open files."""

    segment: _Segment
    data: int  # descriptors
    index: int
    num_synced: int = 0  # bytes of data


class Segments:
    """One thread writes; any thread looks up and reads.

    `write` is for tests of full disks.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        segment_bytes: int,
        adopts: bool = True,
        write: Write = os.pwritev,
    ) -> None:
        """Adopt the segments that are in the folder, or delete them unless it `adopts`: then what is written is not
        adopted later either. Raises `OSError` if the folder cannot be read or written."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._write = write
        self._lock = Lock()  # of all that follows but `_active`
        self._units: dict[Key, Place] = {}
        self._checkpoints: dict[bytes, DiskCheckpoint] = {}
        self._needed: dict[Key, set[bytes]] = {}  # checkpoints that need the unit
        self._were_read: set[Key] = set()  # units, since they were written
        self._segments: list[_Segment] = []  # oldest first
        self._next_number = 0
        self._num_resets = self._num_cleared = 0
        self._blocks_changed, self._checkpoints_changed = KvChanges.snapshot(), KvChanges.snapshot()
        self._active: _Active | None = None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._adopt(adopts=adopts)

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(segment.data_bytes + segment.index_bytes for segment in list(self._segments))

    def find(self, key: Key) -> Place | None:
        """Return where a unit is, None if it is not there."""
        with self._lock:
            return self._units.get(key)

    def find_checkpoint(self, block_hash: bytes) -> DiskCheckpoint | None:
        """Return the checkpoint at the end of this block, all of whose units are there."""
        with self._lock:
            return self._checkpoints.get(block_hash)

    def read(self, key: Key, place: Place) -> memoryview:
        """Read a unit. Raises `Damaged` if it is not what was written, then it is no longer found; `OSError` if the
        segment was deleted meanwhile."""
        buffer = bytearray(place.length)
        descriptor = os.open(self._path(place.segment, "data"), os.O_RDONLY)
        try:
            count = os.preadv(descriptor, [buffer], place.offset)
            os.posix_fadvise(descriptor, place.offset, place.length, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            self._remove(key, place)
            raise Damaged(f"a unit cannot be read: {error.strerror}") from error
        finally:
            os.close(descriptor)
        if count != place.length or xxh3_64_intdigest(buffer) != place.checksum:
            self._remove(key, place)
            raise Damaged("a unit's checksum is wrong")
        with self._lock:
            if self._units.get(key) == place:
                self._were_read.add(key)
        return memoryview(buffer)

    def append(self, buffers: Sequence[bytes | memoryview], checksum: int) -> Place:
        """Write a unit's content. It is found after `add`. Raises `OSError`."""
        length = sum(map(len, buffers))
        active = self._writable(length)
        segment = active.segment
        offset = segment.data_bytes
        self._write_all(active.data, buffers, offset)
        if offset + length - active.num_synced >= _SYNC_BYTES:
            self._sync(active, offset + length)
        return Place(segment.number, offset, length, checksum)

    def add(self, key: Key, place: Place) -> None:
        """Let the unit that `append` just wrote be found. Raises `OSError`."""
        active = self._active
        assert active is not None
        segment = active.segment
        assert (segment.number, segment.data_bytes) == (place.segment, place.offset)
        self._record(active, UnitRecord(*key, place.offset, place.length, place.checksum))
        with self._lock:
            segment.data_bytes += place.length
            if self._num_resets == self._num_cleared:
                self._put(segment, key, place)

    def add_checkpoint(self, record: CheckpointRecord) -> bool:
        """Let a checkpoint be found. Returns False if one of its units is not there. Raises `OSError`."""
        active = self._writable(0)
        if not self._is_whole(DiskCheckpoint(active.segment.number, record)):
            return False
        self._record(active, record)
        with self._lock:
            if self._num_resets == self._num_cleared:
                self._put_checkpoint(active.segment, record)
        return True

    @property
    def must_make_room(self) -> bool:
        """Whether a new segment would exceed the maximum. Call `make_room` then."""
        return len(self._segments) > 1 and self.num_bytes + self._segment_bytes > self._max_bytes

    def is_at_end(self, length: int) -> bool:
        """Whether a unit of this length is written to a new segment."""
        return self._active is None or self._active.segment.data_bytes + length > self._segment_bytes

    def make_room(self) -> Kept:
        """Delete the oldest segment. Returns those of its units that were read, up to half of a segment, to be written
        again."""
        oldest, kept, num_bytes = self._segments[0], Kept([], []), 0
        for key in oldest.keys:
            with self._lock:
                place, was_read = self._units.get(key), key in self._were_read
                needed_by = [self._checkpoints[block_hash].record for block_hash in self._needed.get(key, ())]
            if place is None or not was_read or place.segment != oldest.number:
                continue
            num_bytes += place.length
            if num_bytes > self._segment_bytes // 2:
                break
            with suppress(Damaged, OSError):
                kept.units.append((key, self.read(key, place), place.checksum))
                kept.checkpoints.extend(record for record in needed_by if record not in kept.checkpoints)
        self._delete(oldest)
        return kept

    def delete_oldest(self) -> None:
        """Delete the oldest segment, unless it is the one that is written."""
        if len(self._segments) > 1:
            self._delete(self._segments[0])

    def reset(self) -> None:
        """Find nothing that was added before. Call `clear` on the thread that writes, before it writes again."""
        with self._lock:
            self._num_resets += 1
            self._units, self._checkpoints, self._needed, self._were_read = {}, {}, {}, set()
            self._blocks_changed, self._checkpoints_changed = KvChanges.snapshot(), KvChanges.snapshot()

    def clear(self) -> None:
        """Delete all segments after `reset`. Raises `OSError`.

        What is written from now on is of weights that the folder's name does not tell, so it is not adopted again.
        """
        num_resets = self._num_resets
        self._mark()
        self._close_active()
        for segment in list(self._segments):
            self._delete(segment)
        with self._lock:
            self._num_cleared = num_resets

    def take_changes(self) -> tuple[KvChanges, KvChanges]:
        """Return the changes, since the last call, of what is found: blocks of table 0, and checkpoints. The first ones
        are snapshots."""
        with self._lock:
            changes = self._blocks_changed, self._checkpoints_changed
            self._blocks_changed, self._checkpoints_changed = KvChanges(), KvChanges()
            return changes

    def close(self) -> None:
        self._close_active()

    def _mark(self) -> None:
        """Mark the folder, so that its content is not adopted."""
        os.close(os.open(self._folder / _DISCARD, os.O_CREAT | os.O_WRONLY, 0o600))

    def _adopt(self, *, adopts: bool) -> None:
        files = {path for path in self._folder.iterdir() if path.suffix in (".data", ".index")}
        if not adopts:
            self._mark()
        if (self._folder / _DISCARD).exists():
            for path in files:
                path.unlink()
            if adopts:
                (self._folder / _DISCARD).unlink()
            return
        names = {path.stem for path in files}
        numbers = sorted(int(name) for name in names if name.isdecimal())
        self._next_number = numbers[-1] + 1 if numbers else 0
        for number in numbers:
            self._adopt_segment(_Segment(number))
        while self._segments and self.num_bytes > self._max_bytes:
            self._delete(self._segments[0])

    def _adopt_segment(self, segment: _Segment) -> None:
        """Read a segment's index. A segment without any whole record is deleted."""
        try:
            segment.data_bytes = self._path(segment.number, "data").stat().st_size
            index = self._path(segment.number, "index").read_bytes()
        except FileNotFoundError:
            self._delete(segment)
            return
        segment.index_bytes = len(index)
        self._segments.append(segment)
        with self._lock:
            for record in decode_records(index):
                if isinstance(record, CheckpointRecord):
                    self._put_checkpoint(segment, record)
                elif record.offset + record.length <= segment.data_bytes:
                    place = Place(segment.number, record.offset, record.length, record.checksum)
                    self._put(segment, (record.table, record.block_hash), place)
        if not segment.keys and not segment.checkpoints:
            self._delete(segment)

    def _put(self, segment: _Segment, key: Key, place: Place) -> None:
        if key[0] == 0 and key not in self._units:
            self._blocks_changed.store(key[1])
        self._units[key] = place
        segment.keys.append(key)

    def _put_checkpoint(self, segment: _Segment, record: CheckpointRecord) -> None:
        checkpoint = DiskCheckpoint(segment.number, record)
        keys = checkpoint.keys
        if not all(key in self._units for key in keys):
            return
        if record.block_hash not in self._checkpoints:
            self._checkpoints_changed.store(record.block_hash)
        self._checkpoints[record.block_hash] = checkpoint
        segment.checkpoints.append(record.block_hash)
        for key in keys:
            self._needed.setdefault(key, set()).add(record.block_hash)

    def _is_whole(self, checkpoint: DiskCheckpoint) -> bool:
        with self._lock:
            return all(key in self._units for key in checkpoint.keys)

    def _remove(self, key: Key, place: Place) -> None:
        """Find a unit no longer, nor the checkpoints that need it, if it is still at this place."""
        with self._lock:
            if self._units.get(key) == place:
                self._forget(key)

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

    def _delete(self, segment: _Segment) -> None:
        with self._lock:
            for key in segment.keys:
                place = self._units.get(key)
                if place is not None and place.segment == segment.number:
                    self._forget(key)
            for block_hash in segment.checkpoints:
                checkpoint = self._checkpoints.get(block_hash)
                if checkpoint is not None and checkpoint.segment == segment.number:
                    self._forget_checkpoint(block_hash)
            if segment in self._segments:
                self._segments.remove(segment)
        for kind in ("index", "data"):
            self._path(segment.number, kind).unlink(missing_ok=True)

    def _writable(self, length: int) -> _Active:
        """Return the segment that has room for `length` bytes, a new one if need be."""
        if self._active is not None and not self.is_at_end(length):
            return self._active
        self._close_active()
        number = self._next_number
        self._next_number += 1
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        data = os.open(self._path(number, "data"), flags, 0o600)
        try:
            index = os.open(self._path(number, "index"), flags, 0o600)
        except OSError:
            os.close(data)
            raise
        segment = _Segment(number)
        with self._lock:
            self._segments.append(segment)
        self._active = _Active(segment, data, index)
        return self._active

    def _record(self, active: _Active, record: UnitRecord | CheckpointRecord) -> None:
        encoded = encode_record(record) if active.segment.index_bytes else MAGIC + encode_record(record)
        self._write_all(active.index, [encoded], active.segment.index_bytes)
        active.segment.index_bytes += len(encoded)

    def _close_active(self) -> None:
        active, self._active = self._active, None
        if active is not None:
            os.close(active.data)
            os.close(active.index)

    def _sync(self, active: _Active, end: int) -> None:
        """Have the kernel write the data now and free their memory, which counts towards the
        container's limit."""
        os.fdatasync(active.data)
        os.posix_fadvise(active.data, active.num_synced, end - active.num_synced, os.POSIX_FADV_DONTNEED)
        active.num_synced = end

    def _write_all(self, descriptor: int, buffers: Iterable[bytes | memoryview], offset: int) -> None:
        waiting = [memoryview(buffer) for buffer in buffers]
        while waiting:
            count = self._write(descriptor, waiting, offset)
            offset += count
            while waiting and count >= len(waiting[0]):
                count -= len(waiting.pop(0))
            if count:
                waiting[0] = waiting[0][count:]

    def _path(self, segment: int, kind: str) -> Path:
        return self._folder / f"{segment:08}.{kind}"
