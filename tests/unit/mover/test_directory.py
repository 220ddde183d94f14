"""What the directory of an arena still says after a process died in the middle of a write."""

import os
from dataclasses import replace

import pytest

from proa_engine.core.types import NO_STATE, StoredCheckpoint
from proa_engine.mover.directory import Directory, DirectoryEntry
from proa_engine.mover.layout import ENTRY_BYTES, ArenaLayout

FINGERPRINT = bytes(range(32))
STATES = ArenaLayout(num_pages=20, page_bytes=5000, num_states=3, state_bytes=(700, 64), has_directory=True)
BOTH = replace(STATES, tail_columns=(3, 2))
WINDOWS = replace(BOTH, num_states=0, state_bytes=())


def block(number: int) -> bytes:
    return bytes([number]) * 16


def make(layout: ArenaLayout) -> Directory:
    descriptor = os.memfd_create("proa-test-directory")
    try:
        os.ftruncate(descriptor, layout.num_bytes)
        directory = Directory(descriptor, layout)
    finally:
        os.close(descriptor)
    directory.epoch = directory.initialize(FINGERPRINT, 0, since=50.0)
    return directory


@pytest.fixture
def directory() -> Directory:
    return make(BOTH)


ENTRY = DirectoryEntry((0, block(7)), 12345, 100.0)


def test_an_entry_is_read_as_it_was_written(directory: Directory) -> None:
    assert directory.read(3) is None
    directory.write(3, ENTRY)
    state = DirectoryEntry((-1, block(8)), 2**64 - 1, 0.5)
    directory.write(21, state)
    assert (directory.read(3), directory.read(21), directory.read(4)) == (ENTRY, state, None)


@pytest.mark.parametrize("num_written", range(1, ENTRY_BYTES))
def test_an_entry_that_was_written_in_part_does_not_exist(directory: Directory, num_written: int) -> None:
    directory.write(3, ENTRY)
    before = bytes(directory._view[3 * ENTRY_BYTES : 4 * ENTRY_BYTES])
    directory.write(3, DirectoryEntry((1, block(9)), 54321, 200.0))
    after = bytes(directory._view[3 * ENTRY_BYTES : 4 * ENTRY_BYTES])
    torn = after[:num_written] + before[num_written:]
    directory._view[3 * ENTRY_BYTES : 4 * ENTRY_BYTES] = torn
    entry = directory.read(3)
    assert entry is None or torn in (before, after)


def test_an_entry_of_another_unit_or_epoch_does_not_exist(directory: Directory) -> None:
    directory.write(3, ENTRY)
    directory._view[4 * ENTRY_BYTES : 5 * ENTRY_BYTES] = directory._view[3 * ENTRY_BYTES : 4 * ENTRY_BYTES]
    assert directory.read(4) is None
    directory.epoch = directory.begin_epoch(since=200.0)
    assert directory.read(3) is None
    assert directory.read_header(FINGERPRINT, 0) == (200.0, directory.epoch)


def test_a_new_epoch_is_never_older_than_the_one_before(directory: Directory) -> None:
    directory.begin_epoch(since=200.0)
    directory.begin_epoch(since=100.0)
    assert directory.read_header(FINGERPRINT, 0) == (200.0, 3)


@pytest.mark.parametrize(
    ("layout", "fingerprint", "rank"),
    [
        (BOTH, b"other", 0),
        (BOTH, FINGERPRINT, 1),
        (replace(BOTH, num_pages=19, page_bytes=5263), FINGERPRINT, 0),
        (replace(BOTH, tail_columns=(2, 3)), FINGERPRINT, 0),
    ],
)
def test_the_directory_of_another_engine_is_not_read(layout: ArenaLayout, fingerprint: bytes, rank: int) -> None:
    assert layout.num_bytes == BOTH.num_bytes, "only the header tells them apart"
    descriptor = os.memfd_create("proa-test-directory")
    os.ftruncate(descriptor, BOTH.num_bytes)
    assert Directory(descriptor, BOTH).read_header(FINGERPRINT, 0) is None
    Directory(descriptor, BOTH).initialize(FINGERPRINT, 0, since=50.0)
    assert Directory(descriptor, BOTH).read_header(FINGERPRINT, 0) == (50.0, 1)
    assert Directory(descriptor, layout).read_header(fingerprint, rank) is None
    os.close(descriptor)


def checkpoint_of(layout: ArenaLayout) -> tuple[StoredCheckpoint, dict[int, tuple[int, bytes]]]:
    """A checkpoint behind block 7, and what its units hold."""
    tails = [[(4, block(6)), (9, block(7))], [(5, block(7))]] if layout.tail_columns else []
    state = 2 if layout.num_states else NO_STATE
    holds = {page: (table, block_hash) for table, tail in enumerate(tails, start=1) for page, block_hash in tail}
    if layout.num_states:
        holds[layout.num_pages + 2] = -1, block(7)
    return StoredCheckpoint(block(7), tails, state), holds


@pytest.mark.parametrize("layout", [STATES, BOTH, WINDOWS])
def test_a_checkpoint_is_read_as_it_was_written(layout: ArenaLayout) -> None:
    directory = make(layout)
    checkpoint, holds = checkpoint_of(layout)
    place = 2 if layout.num_states else 9
    assert directory.read_checkpoint(place, holds) is None
    directory.write_checkpoint(checkpoint)
    assert directory.read_checkpoint(place, holds) == checkpoint
    directory.epoch += 1
    assert directory.read_checkpoint(place, holds) is None


@pytest.mark.parametrize("layout", [STATES, BOTH, WINDOWS])
def test_a_checkpoint_with_a_unit_that_is_lost_or_holds_something_else_does_not_exist(layout: ArenaLayout) -> None:
    directory = make(layout)
    checkpoint, holds = checkpoint_of(layout)
    directory.write_checkpoint(checkpoint)
    place = 2 if layout.num_states else 9
    for unit, (table, _) in holds.items():
        others = {key: value for key, value in holds.items() if key != unit}
        assert directory.read_checkpoint(place, others) is None
        assert directory.read_checkpoint(place, {**holds, unit: (table, block(1))}) is None
        if unit < layout.num_pages:
            assert directory.read_checkpoint(place, {**holds, unit: (0, holds[unit][1])}) is None


@pytest.mark.parametrize("layout", [STATES, BOTH, WINDOWS])
def test_a_checkpoint_that_was_written_in_part_does_not_exist(layout: ArenaLayout) -> None:
    directory = make(layout)
    checkpoint, holds = checkpoint_of(layout)
    directory.write_checkpoint(checkpoint)
    place = 2 if layout.num_states else 9
    start = directory._records_start + place * layout.record_bytes
    whole = bytes(directory._view[start : start + layout.record_bytes])
    for index in range(len(whole)):
        for value in {0, 1, 255} - {whole[index]}:
            directory._view[start + index] = value
            found = directory.read_checkpoint(place, holds)
            assert found is None, f"byte {index}"
        directory._view[start + index] = whole[index]
    assert directory.read_checkpoint(place, holds) == checkpoint
