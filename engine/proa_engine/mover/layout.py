"""ArenaLayout: where serials, pages, state slots and the directory are in a rank's arena, which worker and mover both
map.

A serial is the number of the last copies that write a page or slot. The worker sets it before such copies begin, so
a reader that finds the same serial before and after it has read a page has read one content.
"""

from dataclasses import dataclass

SERIAL_BYTES = 8  # little-endian uint64
ENTRY_BYTES = 48  # of the directory, see `Directory`
COUNT_BYTES = 4
DIGEST_BYTES = 8
HEADER_BYTES = 4096
_ALIGNMENT = 4096
_RANGE_BYTES = 1 << 26
_RANGE_PAGES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaLayout:
    """Offsets and sizes in bytes: serials of the pages, then of the state slots; pages; for each part of a state, that
    part of every slot; and the directory, if there is one. A unit is a page or a slot."""

    num_pages: int
    page_bytes: int
    num_states: int = 0
    state_bytes: tuple[int, ...] = ()  # of each part of a state
    has_directory: bool = False
    tail_columns: tuple[int, ...] = ()  # most pages of a checkpoint, by table with a window

    @property
    def num_units(self) -> int:
        return self.num_pages + self.num_states

    @property
    def pages_offset(self) -> int:
        return _aligned(self.num_units * SERIAL_BYTES)

    @property
    def states_offsets(self) -> tuple[int, ...]:
        """Where the first slot of each part is."""
        offsets, offset = [], _aligned(self.pages_offset + self.num_pages * self.page_bytes)
        for part_bytes in self.state_bytes:
            offsets.append(offset)
            offset = _aligned(offset + self.num_states * part_bytes)
        return tuple(offsets)

    @property
    def directory_offset(self) -> int:
        """Where entries of all units are, and behind them records and the header; the end if there is no directory."""
        end = self.pages_offset + self.num_pages * self.page_bytes
        for offset, part_bytes in zip(self.states_offsets, self.state_bytes, strict=True):
            end = offset + self.num_states * part_bytes
        return _aligned(end)

    @property
    def num_records(self) -> int:
        """Most checkpoints of the directory."""
        return self.num_states or (self.num_pages if self.tail_columns else 0)

    @property
    def record_bytes(self) -> int:
        """Size of a checkpoint's record: for each table the number of pages and the pages, then a checksum."""
        return sum(1 + columns for columns in self.tail_columns) * COUNT_BYTES + DIGEST_BYTES

    @property
    def num_bytes(self) -> int:
        if not self.has_directory:
            return self.directory_offset
        entries = self.num_units * ENTRY_BYTES + self.num_records * self.record_bytes
        return self.directory_offset + _aligned(entries) + HEADER_BYTES

    @property
    def page_ranges(self) -> list[tuple[int, int]]:
        """First page and end of the ranges in which pages are adopted: at most 64 MiB or 512 pages each, so that
        neither a range's checksums nor its part of a step take long."""
        size = min(max(_RANGE_BYTES // self.page_bytes, 1), _RANGE_PAGES)
        return [(first, min(first + size, self.num_pages)) for first in range(0, self.num_pages, size)]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
