"""CacheGroups: how many blocks a request needs, and the longest one that fits."""

import pytest

from proa_engine.core.kv.cache_groups import CacheGroups
from support.core import CoreRun, make_request


def groups(num_blocks: int = 64, *windows: int, num_state_slots: int = 0) -> CacheGroups:
    return CacheGroups(
        num_blocks=num_blocks, block_size=4, windows=windows, num_state_slots=num_state_slots, max_step_tokens=8
    )


@pytest.mark.parametrize(
    ("windows", "num_tokens", "num_blocks"),
    [
        ((), 0, 0),
        ((), 1, 1),
        ((), 8, 2),
        ((5,), 8, 4),  # the window has room for five blocks
        ((5,), 41, 11 + 5),
        ((5, 100), 41, 11 + 5 + 11),
        ((5, 100), 400, 100 + 5 + 29),
    ],
)
def test_a_request_needs_blocks_of_all_tables(windows: tuple[int, ...], num_tokens: int, num_blocks: int) -> None:
    assert groups(64, *windows).blocks_of(num_tokens) == num_blocks


@pytest.mark.parametrize("windows", [(), (2,), (5,), (5, 100), (7, 7, 7)])
@pytest.mark.parametrize("num_blocks", [1, 3, 4, 17, 64])
def test_capacity_is_the_longest_request_that_fits(windows: tuple[int, ...], num_blocks: int) -> None:
    sizes = groups(num_blocks, *windows)
    assert sizes.blocks_of(sizes.capacity) <= num_blocks < sizes.blocks_of(sizes.capacity + 1)


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("windows", [(), (2,), (9,), (3, 30)])
@pytest.mark.parametrize("num_drafts", [0, 5])
def test_requests_of_the_full_capacity_end(async_scheduling: bool, windows: tuple[int, ...], num_drafts: int) -> None:
    run = CoreRun(
        num_blocks=30,
        windows=windows,
        async_scheduling=async_scheduling,
        max_num_batched_tokens=12,
        num_speculative_tokens=num_drafts,
        accept=(lambda count: count // 2) if num_drafts else None,
    )
    capacity = run.groups.capacity
    requests = [make_request(name, [ord(name)] * 5, max_tokens=None) for name in "abc"]
    run.submit(*requests)
    run.finish()
    assert capacity < run.max_model_len
    assert [len(run.tokens(name)) for name in "abc"] == [capacity + 1 - 5] * 3


def test_usage_is_the_larger_share_of_blocks_and_slots() -> None:
    run = CoreRun(num_blocks=40, num_state_slots=4, max_num_seqs=3)
    run.submit(make_request("a", range(8), max_tokens=20))
    run.step()
    assert run.core.stats().kv_cache_usage == 1 / 4
    run.submit(make_request("b", range(100), max_tokens=20))
    run.step()
    assert run.core.stats().kv_cache_usage > 2 / 4
