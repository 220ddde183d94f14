"""What a mover offers of an arena that an earlier one, which may have died at any time, has left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from proa_engine.core.kv.mover import Adopted
from proa_engine.core.types import StoredCheckpoint
from proa_engine.memory.arena_memory import open_file
from proa_engine.mover.adoption import adopt
from proa_engine.mover.arena import Arena
from proa_engine.mover.directory import Directory
from proa_engine.mover.index import Index
from proa_engine.mover.layout import ArenaLayout
from support.movers import FINGERPRINT, LAYOUT, RunningMover, hashes, make_job, running_mover

FILE = replace(LAYOUT, has_directory=True, tail_columns=(2, 1))
CHAIN = hashes(5)
STATE_UNIT = LAYOUT.num_pages + 1


@contextmanager
def mover_over(folder: Path, layout: ArenaLayout = FILE, fingerprint: bytes = FINGERPRINT) -> Iterator[RunningMover]:
    memory = open_file(folder, 0, layout, fingerprint, lock_seconds=0)
    try:
        with running_mover(memory=memory, fingerprint=fingerprint) as mover:
            yield mover
    finally:
        memory.close()


def store_all(mover: RunningMover) -> StoredCheckpoint:
    """Five blocks in pages from 0, and a checkpoint behind them: tails in pages 10 to 12, and state 1."""
    mover.store(CHAIN)
    checkpoint = StoredCheckpoint(CHAIN[-1], [[(10, CHAIN[-2]), (11, CHAIN[-1])], [(12, CHAIN[-1])]], state=1)
    mover.begin_store(10, 11, 12, STATE_UNIT)
    for unit in (10, 11, 12, STATE_UNIT):
        mover.write(unit, b"content of %d" % unit)
    mover.end_store(checkpoints=[checkpoint])
    return checkpoint


def contents(ranges: list[Adopted]) -> set[tuple[int, int, bytes]]:
    return {unit[:3] for each in ranges for unit in each.units}


WHOLE = {*((index, 0, block_hash) for index, block_hash in enumerate(CHAIN))} | {
    (10, 1, CHAIN[-2]),
    (11, 1, CHAIN[-1]),
    (12, 2, CHAIN[-1]),
    (1, -1, CHAIN[-1]),
}


def test_all_that_was_settled_is_offered_and_served(tmp_path: Path) -> None:
    with mover_over(tmp_path) as before:
        assert contents(before.adopted()) == set()
        checkpoint = store_all(before)
    with mover_over(tmp_path) as mover, running_mover() as target:
        (adopted,) = mover.adopted()
        assert contents([adopted]) == WHOLE
        assert adopted.checkpoints == (checkpoint,)
        assert (adopted.first_page, adopted.end_page, adopted.is_done) == (0, LAYOUT.num_pages, True)
        target.fetch(make_job(mover, CHAIN, tails=[[8, 9], [7]], state=2, needs_checkpoint=True))
        fetched = target.fetched()
        assert (fetched.num_blocks, fetched.checkpoint, fetched.error) == (5, CHAIN[-1], "")


def test_what_is_adopted_is_left_for_the_next_engine_too(tmp_path: Path) -> None:
    with mover_over(tmp_path) as before:
        store_all(before)
    for _ in range(2):
        with mover_over(tmp_path) as mover:
            assert contents(mover.adopted()) == WHOLE


def test_fetched_blocks_are_offered(tmp_path: Path) -> None:
    with mover_over(tmp_path) as before, running_mover() as source:
        source.store(CHAIN)
        before.fetch(make_job(source, CHAIN, first_page=3))
        before.fetched()
    with mover_over(tmp_path) as mover:
        assert contents(mover.adopted()) == {(3 + index, 0, each) for index, each in enumerate(CHAIN)}


@pytest.mark.parametrize("unit", [0, 4, 10, 11, 12, STATE_UNIT])
def test_a_unit_whose_content_is_damaged_is_not_offered(tmp_path: Path, unit: int) -> None:
    with mover_over(tmp_path) as before:
        store_all(before)
        end = before.arena.buffers(unit)[-1]
    end[-1] ^= 1
    place = unit - LAYOUT.num_pages if unit == STATE_UNIT else unit
    with mover_over(tmp_path) as mover:
        (adopted,) = mover.adopted()
        assert contents([adopted]) == {each for each in WHOLE if each[0] != place or (each[1] == -1) != (unit > 20)}
        assert len(adopted.checkpoints) == (unit < 10)


def test_a_unit_that_is_overwritten_when_the_engine_dies_is_not_offered(tmp_path: Path) -> None:
    """Copies have begun, and their end was never reported: the entry is still that of the content before."""
    with mover_over(tmp_path) as before:
        before.store(CHAIN)
        before.begin_store(2)
        (page,) = before.arena.buffers(2)
        page[: len(page) // 2] = b"x" * (len(page) // 2)
    with mover_over(tmp_path) as mover:
        assert contents(mover.adopted()) == {each for each in WHOLE if each[1] == 0 and each[0] != 2}


def test_of_two_pages_with_a_block_only_the_last_one_is_offered(tmp_path: Path) -> None:
    with mover_over(tmp_path) as before:
        before.store(CHAIN[:1], first_page=7)
        before.begin_store(7)  # evicted
        before.store(CHAIN[:1], first_page=2)
    with mover_over(tmp_path) as mover:
        assert contents(mover.adopted()) == {(2, 0, CHAIN[0])}


def test_the_copies_of_the_next_engine_make_an_adopted_unit_invalid(tmp_path: Path) -> None:
    """Its serials begin anew: the first one differs from that of all adopted units."""
    with mover_over(tmp_path) as before:
        before.store(CHAIN[:1])
    with mover_over(tmp_path) as mover, running_mover() as target:
        mover.adopted()
        mover.begin_store(0)
        target.fetch(make_job(mover, CHAIN[:1], wait_ms=20))
        assert target.fetched().num_blocks == 0


def test_nothing_from_before_a_reset_is_offered(tmp_path: Path) -> None:
    with mover_over(tmp_path) as before:
        store_all(before)
        reset(before, tmp_path)
        before.store(CHAIN[:2], first_page=15)
    with mover_over(tmp_path) as mover:
        (adopted,) = mover.adopted()
        assert contents([adopted]) == {(15, 0, CHAIN[0]), (16, 0, CHAIN[1])}
        assert adopted.checkpoints == ()


def reset(mover: RunningMover, folder: Path) -> None:
    """Do what a worker does."""
    with (folder / "rank-0.arena").open("rb+") as file:
        Directory(file.fileno(), FILE).begin_epoch(200.0)
    mover.reset(200.0)


def test_a_reset_ends_the_adoption(tmp_path: Path) -> None:
    layout = replace(FILE, num_pages=2000)
    with mover_over(tmp_path, layout) as before:
        before.store(CHAIN)
        before.store(CHAIN, first_page=1990)
        before.store(hashes(5, salt=7))
    memory = open_file(tmp_path, 0, layout, FINGERPRINT)
    arena, directory = Arena(memory.descriptor, layout), Directory(memory.descriptor, layout, memory.epoch)
    index = Index(arena, memory.since, directory=directory)
    ranges = adopt(arena, directory, index)
    first = next(ranges)
    index.reset(200.0, 0)
    assert contents([first]) == {(page, 0, each) for page, each in enumerate(hashes(5, salt=7))}
    assert index.blocks(hashes(5, salt=7), 0.0, lambda: True) == []
    others = list(ranges)
    assert contents(others) == set()
    assert [(each.first_page, each.end_page) for each in (first, *others)] == layout.page_ranges
    assert [(each.number, each.is_done) for each in others] == [(1, False), (2, False), (3, True)]
    memory.close()


@pytest.mark.parametrize(
    "change",
    [lambda layout: layout, lambda layout: replace(layout, num_pages=19), lambda layout: replace(layout, num_states=4)],
    ids=["fingerprint", "pages", "states"],
)
def test_what_another_configuration_has_left_is_not_offered(
    tmp_path: Path, change: Callable[[ArenaLayout], ArenaLayout]
) -> None:
    with mover_over(tmp_path) as before:
        store_all(before)
    layout = change(FILE)
    fingerprint = b"other" if layout == FILE else FINGERPRINT
    with mover_over(tmp_path, layout, fingerprint) as mover:
        assert contents(mover.adopted()) == set()
    with mover_over(tmp_path) as mover:
        assert contents(mover.adopted()) == set(), "the file was emptied"
