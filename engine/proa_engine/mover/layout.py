"""ArenaLayout: where serials, pages and state slots are in a rank's arena, which worker and mover both map.

A serial is the number of the last copies that write a page or slot. The worker sets it before such copies begin, so
a reader that finds the same serial before and after it has read a page has read one content.
"""

from dataclasses import dataclass

SERIAL_BYTES = 8  # little-endian uint64
_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaLayout:
    """Offsets and sizes in bytes: serials of the pages, then of the state slots; pages; and, for each part of a state,
    that part of every slot."""

    num_pages: int
    page_bytes: int
    num_states: int = 0
    state_bytes: tuple[int, ...] = ()  # of each part of a state

    @property
    def pages_offset(self) -> int:
        return _aligned((self.num_pages + self.num_states) * SERIAL_BYTES)

    @property
    def states_offsets(self) -> tuple[int, ...]:
        """Where the first slot of each part is."""
        offsets, offset = [], _aligned(self.pages_offset + self.num_pages * self.page_bytes)
        for part_bytes in self.state_bytes:
            offsets.append(offset)
            offset = _aligned(offset + self.num_states * part_bytes)
        return tuple(offsets)

    @property
    def num_bytes(self) -> int:
        end = self.pages_offset + self.num_pages * self.page_bytes
        for offset, part_bytes in zip(self.states_offsets, self.state_bytes, strict=True):
            end = offset + self.num_states * part_bytes
        return _aligned(end)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
