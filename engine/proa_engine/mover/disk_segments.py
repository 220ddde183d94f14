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
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from proa_engine.core.kv_events import KvChanges
from proa_engine.mover.disk_index import DiskCheckpoint, DiskIndex, Place, Segment
from proa_engine.mover.disk_records import MAGIC, CheckpointRecord, UnitRecord, decode_records, encode_record
from proa_engine.mover.index import Key

_SYNC_BYTES = 8 << 20  # of data, after which the kernel writes them and frees their memory
_DISCARD = "discard"  # a file that says that the folder's content must not be used

Write = Callable[[int, Sequence[bytes | memoryview], int], int]  # as `os.pwritev`


class Damaged(ValueError):
    """What a file has is not what was written to it."""


class Kept(NamedTuple):
    """What was read of a segment that is deleted."""

    units: list[tuple[Key, memoryview, int]]  # content and checksum
    checkpoints: list[CheckpointRecord]  # that need any of the units


@dataclass(slots=True)
class _Active:
    """The segment that is written, with its open files. Writing raises `OSError`."""

    segment: Segment
    data: int  # descriptors
    index: int
    write: Write
    num_synced: int = 0  # bytes of data

    def append(self, buffers: Sequence[bytes | memoryview], length: int) -> int:
        """Write a unit behind the others. The next one overwrites it unless its record follows. Returns its offset."""
        offset = self.segment.data_bytes
        self._write_all(self.data, buffers, offset)
        if offset + length - self.num_synced >= _SYNC_BYTES:
            self._sync(offset + length)
        return offset

    def record(self, record: UnitRecord | CheckpointRecord) -> None:
        encoded = encode_record(record) if self.segment.index_bytes else MAGIC + encode_record(record)
        self._write_all(self.index, [encoded], self.segment.index_bytes)
        self.segment.index_bytes += len(encoded)

    def close(self) -> None:
        os.close(self.data)
        os.close(self.index)

    def _sync(self, end: int) -> None:
        """Have the kernel write the data now and free their memory, which counts towards the container's limit."""
        os.fdatasync(self.data)
        os.posix_fadvise(self.data, self.num_synced, end - self.num_synced, os.POSIX_FADV_DONTNEED)
        self.num_synced = end

    def _write_all(self, descriptor: int, buffers: Iterable[bytes | memoryview], offset: int) -> None:
        waiting = [memoryview(buffer) for buffer in buffers]
        while waiting:
            count = self.write(descriptor, waiting, offset)
            offset += count
            while waiting and count >= len(waiting[0]):
                count -= len(waiting.pop(0))
            if count:
                waiting[0] = waiting[0][count:]


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
        self._index = DiskIndex()
        self._segments: list[Segment] = []  # oldest first
        self._next_number = 0
        self._active: _Active | None = None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._adopt(adopts=adopts)

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(segment.data_bytes + segment.index_bytes for segment in list(self._segments))

    def find(self, key: Key) -> Place | None:
        """Return where a unit is, None if it is not there."""
        return self._index.find(key)

    def find_checkpoint(self, block_hash: bytes) -> DiskCheckpoint | None:
        """Return the checkpoint at the end of this block, all of whose units are there."""
        return self._index.find_checkpoint(block_hash)

    def read(self, key: Key, place: Place) -> memoryview:
        """Read a unit. Raises `Damaged` if it is not what was written, then it is no longer found; `OSError` if the
        segment was deleted meanwhile."""
        buffer = bytearray(place.length)
        descriptor = os.open(self._path(place.segment, "data"), os.O_RDONLY)
        try:
            count = os.preadv(descriptor, [buffer], place.offset)
            os.posix_fadvise(descriptor, place.offset, place.length, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            self._index.remove(key, place)
            raise Damaged(f"a unit cannot be read: {error.strerror}") from error
        finally:
            os.close(descriptor)
        if count != place.length or xxh3_64_intdigest(buffer) != place.checksum:
            self._index.remove(key, place)
            raise Damaged("a unit's checksum is wrong")
        self._index.note_read(key, place)
        return memoryview(buffer)

    def append(self, buffers: Sequence[bytes | memoryview], checksum: int) -> Place:
        """Write a unit's content. It is found after `add`. Raises `OSError`."""
        length = sum(map(len, buffers))
        active = self._writable(length)
        return Place(active.segment.number, active.append(buffers, length), length, checksum)

    def add(self, key: Key, place: Place) -> None:
        """Let the unit that `append` just wrote be found. Raises `OSError`."""
        active = self._active
        assert active is not None
        segment = active.segment
        assert (segment.number, segment.data_bytes) == (place.segment, place.offset)
        active.record(UnitRecord(*key, place.offset, place.length, place.checksum))
        segment.data_bytes += place.length
        self._index.add(segment, key, place)

    def add_checkpoint(self, record: CheckpointRecord) -> bool:
        """Let a checkpoint be found. Returns False if one of its units is not there. Raises `OSError`."""
        active = self._writable(0)
        if not self._index.is_whole(record):
            return False
        active.record(record)
        self._index.add_checkpoint(active.segment, record)
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
        for key, place, needed_by in self._index.units_read(oldest):
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
        self._index.reset()

    def clear(self) -> None:
        """Delete all segments after `reset`. Raises `OSError`.

        What is written from now on is of weights that the folder's name does not tell, so it is not adopted again.
        """
        num_resets = self._index.num_resets
        self._mark()
        self._close_active()
        for segment in list(self._segments):
            self._delete(segment)
        self._index.finish_reset(num_resets)

    def take_changes(self) -> tuple[KvChanges, KvChanges]:
        """See `DiskIndex`."""
        return self._index.take_changes()

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
            self._adopt_segment(Segment(number))
        while self._segments and self.num_bytes > self._max_bytes:
            self._delete(self._segments[0])

    def _adopt_segment(self, segment: Segment) -> None:
        """Read a segment's index. A segment without any whole record is deleted."""
        try:
            segment.data_bytes = self._path(segment.number, "data").stat().st_size
            index = self._path(segment.number, "index").read_bytes()
        except FileNotFoundError:
            self._delete(segment)
            return
        segment.index_bytes = len(index)
        self._segments.append(segment)
        for record in decode_records(index):
            if isinstance(record, CheckpointRecord):
                self._index.add_checkpoint(segment, record)
            elif record.offset + record.length <= segment.data_bytes:
                place = Place(segment.number, record.offset, record.length, record.checksum)
                self._index.add(segment, (record.table, record.block_hash), place)
        if not segment.keys and not segment.checkpoints:
            self._delete(segment)

    def _delete(self, segment: Segment) -> None:
        self._index.forget(segment)
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
        segment = Segment(number)
        self._segments.append(segment)
        self._active = _Active(segment, data, index, self._write)
        return self._active

    def _close_active(self) -> None:
        active, self._active = self._active, None
        if active is not None:
            active.close()

    def _path(self, segment: int, kind: str) -> Path:
        return self._folder / f"{segment:08}.{kind}"
