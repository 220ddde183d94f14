"""The index of what a mover may serve: it never grows beyond the arena, and never has what a job overwrites."""

from collections.abc import Iterator
from threading import Thread

import pytest

from proa_engine.core.types import StoredCheckpoint
from proa_engine.memory.arena_memory import anonymous_memory
from proa_engine.mover.arena import Arena
from proa_engine.mover.index import Index
from support.movers import LAYOUT, hashes, make_job


@pytest.fixture
def arena() -> Iterator[Arena]:
    memory = anonymous_memory(LAYOUT)
    yield Arena(memory.descriptor, LAYOUT)
    memory.close()


def store(arena: Arena, index: Index, serial: int, page: int, block_hash: bytes) -> None:
    arena._serials[page] = serial
    index.settle(serial, [(page, block_hash)])


def test_checkpoints_whose_units_were_overwritten_are_removed(arena: Arena) -> None:
    """Also those that no engine asks for."""
    index, chain = Index(arena, since=0.0), hashes(50)
    for serial, block_hash in enumerate(chain, start=1):
        arena._serials[4] = arena._serials[arena.unit_of_slot(1)] = serial
        index.settle(serial, checkpoints=[StoredCheckpoint(block_hash, [[(4, block_hash)]], state=1)])
    assert list(index._checkpoints) == chain[-1:]
    assert index.checkpoint(chain[-1:], 0.0, lambda: True) is not None


def test_a_block_that_is_stored_twice_stays_when_its_first_page_is_overwritten(arena: Arena) -> None:
    index, (block_hash, other) = Index(arena, since=0.0), hashes(2)
    store(arena, index, 1, 3, block_hash)
    index.add_received([((0, block_hash), 7, arena.checksum(7))], None, index.num_resets)
    store(arena, index, 2, 3, other)
    entry = index.find((0, block_hash))
    assert entry is not None
    assert entry.unit == 7


def test_a_page_that_copies_still_write_when_a_job_begins_is_not_served(arena: Arena) -> None:
    """The job writes the page when the copies are complete, whose block was evicted meanwhile."""
    index, (evicted, fetched) = Index(arena, since=0.0), hashes(2)
    job, cleared = make_job("", [fetched], first_page=3, copied=1, wait_ms=20_000), list[bool]()
    thread = Thread(target=lambda: cleared.append(index.clear_for(job)))
    thread.start()
    store(arena, index, 1, 3, evicted)
    thread.join()
    assert cleared == [True]
    assert index.find((0, evicted)) is None
