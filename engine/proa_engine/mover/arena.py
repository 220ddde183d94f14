"""Arena: a rank's pages and state slots in memory that its worker and its mover both map."""

from mmap import mmap

from xxhash import xxh3_64

from proa_engine.mover.layout import SERIAL_BYTES, ArenaLayout


class Arena:
    """A page is one buffer; a state slot has one for each part of a state. A unit is either of them: pages are numbered
    from 0, slots from `layout.num_pages`."""

    def __init__(self, descriptor: int, layout: ArenaLayout) -> None:
        self.layout = layout
        self._view = memoryview(mmap(descriptor, layout.num_bytes))
        self._serials = self._view[: (layout.num_pages + layout.num_states) * SERIAL_BYTES].cast("Q")

    def serial(self, unit: int) -> int:
        """Return the number of the last copies that write the unit; see `ArenaLayout`."""
        return self._serials[unit]

    def unit_of_slot(self, slot: int) -> int:
        return self.layout.num_pages + slot

    def buffers(self, unit: int) -> list[memoryview]:
        """Return the unit's memory."""
        layout = self.layout
        if unit < layout.num_pages:
            start = layout.pages_offset + unit * layout.page_bytes
            return [self._view[start : start + layout.page_bytes]]
        slot = unit - layout.num_pages
        starts = (
            (offset + slot * num_bytes, num_bytes)
            for offset, num_bytes in zip(layout.states_offsets, layout.state_bytes, strict=True)
        )
        return [self._view[start : start + num_bytes] for start, num_bytes in starts]

    def checksum(self, unit: int) -> int:
        """Return the unit's xxh3, 64 bits."""
        digest = xxh3_64()
        for buffer in self.buffers(unit):
            digest.update(buffer)
        return digest.intdigest()
