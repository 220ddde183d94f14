"""A core that adopts what an earlier one has left in host memory, while requests run."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from proa.contract import EngineCoreRequest
from proa_engine.core.kv.host_tier import HostTier, HostTierConfig
from proa_engine.core.kv.mover import Adopted, AdoptedUnit
from proa_engine.core.kv.state_slots import slot_of
from proa_engine.core.types import NO_STATE, StoredCheckpoint
from support.core import CoreRun, make_request
from support.core_traffic import MAX_MODEL_LEN, Follower, Traffic
from support.thorough import seeds

PROMPT = tuple(range(1, 34))  # eight full blocks of 4, and one token
SHAPES: dict[str, dict[str, Any]] = {
    "full": {},
    "windows": {"windows": (5, 9), "checkpoint_interval": 8},
    "states": {"num_state_slots": 12, "checkpoint_interval": 8},
    "states and windows": {"windows": (5,), "num_state_slots": 12, "checkpoint_interval": 8},
}
BLOCK = bytes(16)


def host_of(run: CoreRun) -> HostTier:
    host = run.manager.tiers.host
    assert isinstance(host, HostTier)
    return host


def left_by(run: CoreRun) -> tuple[list[AdoptedUnit], list[StoredCheckpoint]]:
    """What a core that has stored everything has in host memory; the pages in the order of their hashes' storing."""
    cache = host_of(run).pools.cache
    tables = [cache.cached_blocks, *cache.cached_window_blocks]
    units = [
        AdoptedUnit(page.block_id, table, block_hash, float(number))
        for table, blocks in enumerate(tables)
        for number, (block_hash, page) in enumerate(blocks.items())
    ]
    units += [AdoptedUnit(slot.block_id, -1, block_hash, 0.0) for block_hash, slot in cache.cached_states.items()]
    checkpoints = [
        StoredCheckpoint(
            block_hash,
            [[(page.block_id, page.block_hash) for page in pages] for pages in checkpoint.window_blocks],
            slot_of(checkpoint.states),
        )
        for block_hash, checkpoint in cache.checkpoints.items()
    ]
    return units, checkpoints


def ranges_of(
    units: Sequence[AdoptedUnit], checkpoints: Sequence[StoredCheckpoint], num_pages: int, size: int
) -> list[Adopted]:
    """What a mover sends, in ranges of `size` pages."""
    starts = range(0, num_pages, size)
    return [
        Adopted(
            number=number,
            first_page=first,
            end_page=min(first + size, num_pages),
            units=tuple(
                unit
                for unit in units
                if (unit.table >= 0 and first <= unit.place < first + size) or (unit.table < 0 and first == starts[-1])
            ),
            checkpoints=tuple(checkpoints) if first == starts[-1] else (),
            is_done=first == starts[-1],
        )
        for number, first in enumerate(starts)
    ]


def restarted(before: CoreRun, config: HostTierConfig, **shape: Any) -> CoreRun:
    """A core over the host memory of another one, with nothing adopted yet."""
    run = CoreRun(**shape, host=replace(config, adopts=True))
    assert run.executor.host is not None
    assert before.executor.host is not None
    run.executor.host._pages.host[:] = before.executor.host._pages.host
    run.executor.host._states.host[:] = before.executor.host._states.host
    return run


def run_with(num_pages: int = 20) -> CoreRun:
    return CoreRun(host=HostTierConfig(num_pages=num_pages, adopts=True))


def take(run: CoreRun, ranges: Sequence[Adopted]) -> None:
    for adopted in ranges:
        run.core.take_from_mover(adopted)
        run.step()


def run_of(request: EngineCoreRequest, shape: str, host: HostTierConfig) -> CoreRun:
    """A run that has finished the request and had the time to store its blocks."""
    run = CoreRun(**SHAPES[shape], host=host)
    run.submit(request)
    run.finish()
    run.steps(3)
    return run


def page(place: int, block: int, stored: float = 0.0) -> AdoptedUnit:
    return AdoptedUnit(place, 0, bytes([block]) * 16, stored)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_request_loads_what_was_adopted(shape: str) -> None:
    config = HostTierConfig(num_pages=60, num_states=8)
    request = make_request(prompt=PROMPT)
    before = run_of(request, shape, config)
    run = restarted(before, config, **SHAPES[shape])
    take(run, ranges_of(*left_by(before), 60, 7))
    assert host_of(run)._adoption.is_done
    assert run.hashes_in_host == before.hashes_in_host
    run.submit(request)
    run.finish()
    run.assert_complete([request])
    assert run.last().num_cached_tokens == 32


def test_pages_are_not_allocated_before_their_range_has_come() -> None:
    run = run_with(num_pages=20)
    pages = host_of(run).pools.blocks
    assert pages.num_free_blocks == 0
    first, *others = ranges_of([page(1, 7)], [], 20, 10)
    take(run, [first])
    assert pages.num_free_blocks == 10
    assert [page.block_id for page in pages.get_new_blocks(10)][-1] == 1, "pages without content are taken first"
    pages.free_blocks(pages.blocks[:10])
    take(run, others)
    assert pages.num_free_blocks == 20


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_computed_before_pages_have_come_is_stored_then(shape: str) -> None:
    config = HostTierConfig(num_pages=60, num_states=8)
    request = make_request(prompt=PROMPT)
    usual = run_of(request, shape, config)
    run = run_of(request, shape, replace(config, adopts=True))
    assert run.hashes_in_host == (set(), set())
    assert not run.core.has_work(), "it does not step while it waits"
    take(run, ranges_of([], [], 60, 30))
    run.steps(3)
    assert run.hashes_in_host == usual.hashes_in_host
    host = run.core.counters().cache.host
    assert host is not None
    assert host.num_skipped_stores == 0


def test_the_oldest_adopted_page_is_evicted_first_and_a_chain_from_its_end() -> None:
    run = run_with(num_pages=6)
    units = [page(0, 1, 5.0), page(1, 2, 3.0), page(2, 3, 3.0), page(3, 4, 9.0), page(5, 5, 1.0)]
    take(run, ranges_of(units, [], 6, 2))
    order = [host_of(run).pools.blocks.get_new_blocks(1)[0].block_id for _ in range(6)]
    assert order == [4, 5, 2, 1, 0, 3]  # page 4 is empty


def test_nothing_is_adopted_after_a_reset() -> None:
    run = run_with(num_pages=6)
    ranges = ranges_of([page(0, 1), page(4, 2)], [], 6, 3)
    take(run, ranges[:1])
    assert len(run.hashes_in_host[0]) == 1
    run.reset_prefix_cache()
    run.steps(1)
    take(run, ranges[1:])
    assert run.hashes_in_host == (set(), set())
    assert host_of(run).pools.blocks.num_free_blocks == 6


def test_a_checkpoint_with_a_page_that_is_not_adopted_is_dropped() -> None:
    shape = SHAPES["windows"]
    config = HostTierConfig(num_pages=60)
    before = CoreRun(**shape, host=config)
    before.submit(make_request(prompt=PROMPT))
    before.finish()
    before.steps(3)
    units, checkpoints = left_by(before)
    tail_pages = {place for stored in checkpoints for tail in stored.tails for place, _ in tail}
    run = restarted(before, config, **shape)
    take(run, ranges_of([unit for unit in units if unit.place not in tail_pages], checkpoints, 60, 7))
    assert run.hashes_in_host == (before.hashes_in_host[0], set())
    assert host_of(run).pools.blocks.num_free_blocks == 60


def drive(seed: int, shape: str) -> CoreRun:
    """Random traffic on a core, then on one that adopts what it has left, range by range, some units lost."""
    rng = random.Random(f"{shape} {seed}")
    config = HostTierConfig(
        num_pages=rng.choice([5, 50, 200]), num_states=rng.choice([2, 20]), max_step_pages=rng.choice([1, 1000])
    )
    sizes = {"num_blocks": rng.choice([70, 100]), "max_model_len": MAX_MODEL_LEN, **SHAPES[shape]}
    before = CoreRun(**sizes, host=config)
    Traffic(before, random.Random(seed), 20, 0.1, follow_up_share=0.5).drive()
    before.steps(50)
    units, checkpoints = left_by(before)
    share = rng.choice([0.9, 1.0])
    whole = [unit for unit in units if rng.random() < share]
    kept = {unit[:3] for unit in whole}
    checkpoints = [stored for stored in checkpoints if _units_of(stored) <= kept]
    run = restarted(before, config, **sizes)
    coming = ranges_of(whole, checkpoints, config.num_pages, rng.choice([1, 7, 1000]))
    num_first = rng.choice([0, rng.randint(0, len(coming)), len(coming)])
    take(run, coming[:num_first])
    del coming[:num_first]
    traffic, follower = Traffic(run, random.Random(seed), 20, 0.1, follow_up_share=0.5), Follower(run, rng)

    def step() -> None:
        if coming and rng.random() < 0.5:
            run.core.take_from_mover(coming.pop(0))
        if rng.random() < (0.03 if coming else 0.003):
            run.reset_prefix_cache()
        follower.step()

    traffic.step = step
    traffic.drive()
    take(run, coming)
    assert host_of(run)._adoption.is_done
    for request_id in run.outputs:
        traffic.check(traffic.requests[request_id])
    return run


def _units_of(stored: StoredCheckpoint) -> set[tuple[int, int, bytes]]:
    units = {(place, table, of) for table, tail in enumerate(stored.tails, start=1) for place, of in tail}
    return units if stored.state == NO_STATE else units | {(stored.state, -1, stored.block_hash)}


@pytest.mark.parametrize("shape", SHAPES)
def test_random_traffic_while_blocks_are_adopted(shape: str) -> None:
    num_loaded = 0
    for seed in seeds(12, thorough=200):
        occupancy = drive(seed, shape).core.counters().cache.host
        assert occupancy is not None
        num_loaded += occupancy.num_loaded_pages
    assert num_loaded > 0
