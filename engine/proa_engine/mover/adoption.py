"""Adoption: verifies what an earlier engine has left in the arena, range by range of its pages."""

from collections.abc import Iterator

from proa_engine.core.kv.mover import Adopted, AdoptedUnit
from proa_engine.mover.arena import Arena
from proa_engine.mover.directory import Directory, DirectoryEntry
from proa_engine.mover.index import STATE, Index, Key


def adopt(arena: Arena, directory: Directory, index: Index) -> Iterator[Adopted]:
    """Yield what each range has. Units whose content has the checksum of their entries are also added to `index`,
    unless it is reset meanwhile.

    The core allocates no page before it has got the page's range, so that none changes meanwhile.
    """
    layout, num_resets = arena.layout, index.num_resets
    entries = _newest_entries(directory, layout.num_pages, layout.num_units)
    adopted: dict[int, Key] = {}  # what units hold
    ranges = layout.page_ranges
    for number, (first, end) in enumerate(ranges):
        is_done = number == len(ranges) - 1
        units = [*range(first, end), *(range(layout.num_pages, layout.num_units) if is_done else ())]
        whole = [(unit, entries[unit]) for unit in units if unit in entries and _is_whole(arena, unit, entries[unit])]
        received = [(entry.key, unit, entry.checksum) for unit, entry in whole]
        adopted |= {unit: entry.key for unit, entry in whole}
        records = [directory.read_checkpoint(place, adopted) for place in range(layout.num_records if is_done else 0)]
        checkpoints = tuple(record for record in records if record is not None)
        is_current = index.add_adopted(received, checkpoints, num_resets)
        yield Adopted(
            number=number,
            first_page=first,
            end_page=end,
            units=tuple(
                AdoptedUnit(unit if unit < layout.num_pages else unit - layout.num_pages, *entry.key, entry.stored)
                for unit, entry in whole
                if is_current
            ),
            checkpoints=checkpoints if is_current else (),
            is_done=is_done,
        )


def _newest_entries(directory: Directory, num_pages: int, num_units: int) -> dict[int, DirectoryEntry]:
    """Return the entries by unit. Of units that have held the same block, only the last one counts."""
    newest: dict[Key, tuple[int, DirectoryEntry]] = {}
    for unit in range(num_units):
        entry = directory.read(unit)
        if entry is None or (entry.key[0] == STATE) != (unit >= num_pages):
            continue
        if entry.key not in newest or newest[entry.key][1].stored < entry.stored:
            newest[entry.key] = unit, entry
    return dict(newest.values())


def _is_whole(arena: Arena, unit: int, entry: DirectoryEntry) -> bool:
    return arena.checksum(unit) == entry.checksum
