"""Directory: what the units of an arena hold, written beside them, so that a restarted engine can adopt them.

It is the end of the arena's file: an entry for each unit, a record for each checkpoint, and a header. The mover writes
an entry when a unit is settled: the name of the block that it holds, and the checksum of its content.

Worker and mover may be killed at any time, also while they write a page or an entry. That is safe because an entry
never says which unit is valid now, only which content has which name, and this stays true:

- An entry has a checksum of its own, so one that was written in part does not exist.
- An entry is not removed when its unit is overwritten. Until the next one is written, the unit's content differs from
  the entry's checksum, in part or as a whole, so the unit is not adopted. Adopted is only a unit whose content has been
  read and has the checksum. So no order of writes matters, and the serials of an earlier engine have no meaning.
- A record names a checkpoint's pages, and its checksum covers the names of the blocks in them: if one of the pages has
  got another block, the record does not exist.
- Other weights: the header has an identity of everything that a block's content depends on; a file with another one is
  emptied. A reset of the cache begins an epoch, which is part of each checksum of an entry or a record, so one write of
  eight bytes removes all of them.

The alternative, to mark an entry as invalid before its unit is overwritten, needs an order between two processes and a
GPU, and content would have to be verified nevertheless.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from mmap import mmap
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from proa_engine.core.types import NO_STATE, StoredCheckpoint
from proa_engine.mover.layout import COUNT_BYTES, DIGEST_BYTES, ENTRY_BYTES, HEADER_BYTES, ArenaLayout

_VERSION = 1
_MAGIC = b"PROAKV01"
_HEADER = struct.Struct("<8s32sdQ")  # magic, identity, since, epoch
_EPOCH = struct.Struct("<Q")
_EPOCH_OFFSET = 48
_ENTRY = struct.Struct("<16sqQd")  # hash, table, checksum of the unit's content, Unix seconds
_DIGEST = struct.Struct("<Q")
assert _ENTRY.size + _DIGEST.size == ENTRY_BYTES
assert _DIGEST.size == DIGEST_BYTES


class DirectoryEntry(NamedTuple):
    """What a unit held when it was settled, at a time in Unix seconds."""

    key: tuple[int, bytes]  # table, or `STATE` of the index, and hash
    checksum: int
    stored: float


class NoDirectory:
    """The directory of an arena that no later engine adopts."""

    epoch = 0

    def write(self, unit: int, entry: DirectoryEntry) -> None:
        pass

    def write_checkpoint(self, checkpoint: StoredCheckpoint) -> None:
        pass


class Directory:
    """The directory of an arena whose layout has one. The mover writes entries and records; the worker begins epochs
    and, before the mover starts, initializes it. `epoch` is the one of entries and records that are written."""

    def __init__(self, descriptor: int, layout: ArenaLayout, epoch: int = 0) -> None:
        assert layout.has_directory
        self.epoch = epoch
        self._layout = layout
        start = layout.directory_offset
        self._view = memoryview(mmap(descriptor, layout.num_bytes - start, offset=start))
        self._records_start = layout.num_units * ENTRY_BYTES
        self._header = self._view[len(self._view) - HEADER_BYTES :]

    def read_header(self, fingerprint: bytes, rank: int) -> tuple[float, int] | None:
        """Return the time from which on the units were stored, and the epoch; None if the directory is of engines with
        which this one has not everything in common, or of none."""
        magic, identity, since, epoch = _HEADER.unpack_from(self._header)
        return (since, epoch) if (magic, identity) == (_MAGIC, self._identity(fingerprint, rank)) else None

    def initialize(self, fingerprint: bytes, rank: int, since: float) -> int:
        """Write the header of a directory without entries. Returns the epoch."""
        epoch = 1
        _HEADER.pack_into(self._header, 0, _MAGIC, self._identity(fingerprint, rank), since, epoch)
        return epoch

    def begin_epoch(self, since: float) -> int:
        """Remove all entries and records: no unit was stored before `since`. Returns the new epoch."""
        magic, identity, since_before, epoch_before = _HEADER.unpack_from(self._header)
        epoch: int = epoch_before + 1
        _EPOCH.pack_into(self._header, _EPOCH_OFFSET, epoch)  # before the rest
        _HEADER.pack_into(self._header, 0, magic, identity, max(since, since_before), epoch)
        return epoch

    def write(self, unit: int, entry: DirectoryEntry) -> None:
        """Write the entry of a unit."""
        (table, block_hash), checksum, stored = entry
        packed = _ENTRY.pack(block_hash, table, checksum, stored)
        start = unit * ENTRY_BYTES
        self._view[start : start + ENTRY_BYTES] = packed + _DIGEST.pack(self._digest(unit, packed))

    def read(self, unit: int) -> DirectoryEntry | None:
        """Return the entry of a unit; None if it has none of this epoch."""
        start = unit * ENTRY_BYTES
        content = bytes(self._view[start : start + ENTRY_BYTES])
        packed = content[: _ENTRY.size]
        if _DIGEST.unpack_from(content, _ENTRY.size) != (self._digest(unit, packed),):
            return None
        block_hash, table, checksum, stored = _ENTRY.unpack(packed)
        return DirectoryEntry((table, block_hash), checksum, stored)

    def write_checkpoint(self, checkpoint: StoredCheckpoint) -> None:
        """Write the record of a checkpoint whose units have entries."""
        place = self._place(checkpoint)
        packed = b"".join(
            struct.pack(f"<I{columns}I", len(tail), *(page for page, _ in tail), *[0] * (columns - len(tail)))
            for tail, columns in zip(checkpoint.tails, self._layout.tail_columns, strict=True)
        )
        start = self._records_start + place * self._layout.record_bytes
        digest = self._digest(place, packed + _hashes(checkpoint))
        self._view[start : start + self._layout.record_bytes] = packed + _DIGEST.pack(digest)

    def read_checkpoint(self, place: int, adopted: Mapping[int, tuple[int, bytes]]) -> StoredCheckpoint | None:
        """Return the checkpoint whose record is at this place, out of `layout.num_records`, if all its units are
        `adopted`: units with what they hold."""
        layout = self._layout
        start = self._records_start + place * layout.record_bytes
        content = bytes(self._view[start : start + layout.record_bytes])
        state, unit = (place, layout.num_pages + place) if layout.num_states else (NO_STATE, place)
        if unit not in adopted:
            return None
        tails, offset = list[list[tuple[int, bytes]]](), 0
        for table, columns in enumerate(layout.tail_columns, start=1):
            count, *pages = struct.unpack_from(f"<I{columns}I", content, offset)
            keys = [adopted.get(page) for page in pages[:count]]
            tails.append([(page, key[1]) for page, key in zip(pages, keys, strict=False) if key and key[0] == table])
            if count > columns or not len(tails[-1]) == count > 0:
                return None
            offset += (1 + columns) * COUNT_BYTES
        checkpoint = StoredCheckpoint(adopted[unit][1], tails, state)
        digest = self._digest(place, content[:offset] + _hashes(checkpoint))
        return checkpoint if _DIGEST.unpack_from(content, offset) == (digest,) else None

    def _place(self, checkpoint: StoredCheckpoint) -> int:
        """Return the number of a checkpoint's record: its slot or, without states, its last page in table 1, which no
        other checkpoint ends with."""
        return checkpoint.state if self._layout.num_states else checkpoint.tails[0][-1][0]

    def _digest(self, number: int, content: bytes) -> int:
        return xxh3_64_intdigest(content + _DIGEST.pack(number), self.epoch)

    def _identity(self, fingerprint: bytes, rank: int) -> bytes:
        return hashlib.sha256(repr((_VERSION, fingerprint, rank, self._layout)).encode()).digest()


def _hashes(checkpoint: StoredCheckpoint) -> bytes:
    tails: Sequence[Sequence[tuple[int, bytes]]] = checkpoint.tails
    return checkpoint.block_hash + b"".join(block_hash for tail in tails for _, block_hash in tail)
