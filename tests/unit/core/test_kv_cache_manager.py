"""KVCacheManager: allocation and prefix cache hits."""

from collections.abc import Sequence

import pytest

from proa.contract import SchedulerStats
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.kv.kv_cache_manager import MISS, KVCacheManager
from proa_engine.core.request import Request
from support.core import hash_block, make_request

BLOCK_SIZE = 4


def usage_of(manager: KVCacheManager) -> float:
    stats = SchedulerStats()
    manager.fill_stats(stats)
    return stats.kv_cache_usage


def make_manager(num_blocks: int = 8, *, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(
        CacheGroups(num_blocks=num_blocks, block_size=BLOCK_SIZE),
        hash_block=hash_block if caching else None,
        root_hash=b"root",
    )


def live(prompt: Sequence[int], *, order: int = 0, **params: object) -> Request:
    request = make_request(f"r{order}", prompt, **params)  # type: ignore[arg-type]
    return Request(request, order=(0, order), max_num_tokens=100, eos_token_ids=frozenset())


def compute(manager: KVCacheManager, request: Request) -> None:
    """Give the request its blocks, and let its known tokens be planned."""
    hit = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, request.num_tokens, hit) is not None
    request.num_computed_tokens = request.num_tokens
    manager.cache_blocks([(request, 0)])


def test_allocates_only_what_is_missing() -> None:
    manager, request = make_manager(), live(range(5))
    assert manager.allocate_slots(request, 5, MISS) == [[0, 1]]
    assert manager.tables.extend(request, 8) == [[]]
    assert manager.tables.extend(request, 9) == [[2]]
    assert usage_of(manager) == 3 / 8


def test_a_failed_allocation_changes_nothing() -> None:
    manager, request = make_manager(2), live(range(5))
    assert manager.allocate_slots(request, 9, MISS) is None
    assert not request.tables
    assert usage_of(manager) == 0


def test_free_gives_everything_back() -> None:
    manager, request = make_manager(), live(range(9))
    compute(manager, request)
    manager.free(request)
    request.num_computed_tokens = 0
    assert usage_of(manager) == 0
    manager.check_integrity([])


def test_finds_the_longest_known_prefix() -> None:
    manager = make_manager()
    compute(manager, live([*range(8), 50, 51, 52, 53, 54]))
    found = manager.get_computed_blocks(live([*range(8), 60, 61, 62, 63, 64], order=1))
    assert [block.block_id for block in found.blocks] == [0, 1]


def test_a_block_after_another_prefix_is_another_block() -> None:
    manager = make_manager()
    compute(manager, live([1, 1, 1, 1, 5, 6, 7, 8, 9]))
    compute(manager, live([2, 2, 2, 2, 3], order=1))
    assert len(manager.get_computed_blocks(live([2, 2, 2, 2, 5, 6, 7, 8, 9], order=2)).blocks) == 1


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(4, 0), (5, 1), (8, 1), (9, 2)])
def test_a_fully_cached_prompt_leaves_its_last_token_to_compute(num_tokens: int, num_blocks: int) -> None:
    manager = make_manager()
    compute(manager, live(range(num_tokens)))
    assert len(manager.get_computed_blocks(live(range(num_tokens), order=1)).blocks) == num_blocks


def test_requests_with_different_salts_share_nothing() -> None:
    manager = make_manager()
    compute(manager, live(range(9), cache_salt="mine"))
    assert not manager.get_computed_blocks(live(range(9), order=1)).blocks
    assert not manager.get_computed_blocks(live(range(9), order=2, cache_salt="yours")).blocks
    assert len(manager.get_computed_blocks(live(range(9), order=3, cache_salt="mine")).blocks) == 2


def test_prompt_logprobs_read_no_cache_but_fill_it() -> None:
    manager = make_manager()
    compute(manager, live(range(9), prompt_logprobs=0))
    assert not manager.get_computed_blocks(live(range(9), order=1, prompt_logprobs=0)).blocks
    assert len(manager.get_computed_blocks(live(range(9), order=2)).blocks) == 2


def test_without_caching_nothing_is_hashed_or_found() -> None:
    manager = make_manager(caching=False)
    request = live(range(9))
    compute(manager, request)
    assert not request.block_hashes
    assert not manager.get_computed_blocks(live(range(9), order=1)).blocks


def test_publishes_only_full_blocks_of_scheduled_and_known_tokens() -> None:
    manager, request = make_manager(), live(range(9))
    manager.allocate_slots(request, 12, MISS)
    request.num_computed_tokens = 7
    manager.cache_blocks([(request, 0)])
    assert request.num_cached_blocks == 1
    request.num_computed_tokens = 12  # three more are planned, which the host does not know
    manager.cache_blocks([(request, 0)])
    assert request.num_cached_blocks == 2


def test_shares_blocks_in_use_and_counts_free_hits_as_taken() -> None:
    manager = make_manager(3)
    first = live(range(9))
    compute(manager, first)
    second = live([*range(8), 99], order=1)
    hit = manager.get_computed_blocks(second)
    assert manager.allocate_slots(second, 9, hit) is None  # no third block for the last token
    manager.free(first)
    assert manager.allocate_slots(second, 9, hit) == [[0, 1, 2]]


def test_hits_on_free_blocks_are_not_allocated_as_new() -> None:
    manager = make_manager(3)
    first = live(range(9))
    compute(manager, first)
    manager.free(first)
    second = live([*range(8), 99, 98, 97, 96, 95], order=1)
    assert manager.allocate_slots(second, 13, manager.get_computed_blocks(second)) is None
    assert usage_of(manager) == 0


def test_reset_clears_prefixes_and_blocks_that_build_on_them() -> None:
    manager, request = make_manager(), live(range(9))
    compute(manager, request)
    manager.reset_prefix_cache([request])
    request.token_ids += range(9, 13)
    compute_more = manager.tables.extend(request, 13)
    assert compute_more is not None
    request.num_computed_tokens = 13
    manager.cache_blocks([(request, 0)])
    assert not manager.get_computed_blocks(live(range(13), order=1)).blocks
    compute(manager, live(range(5), order=2))
    assert len(manager.get_computed_blocks(live(range(13), order=3)).blocks) == 1


def test_hashes_each_block_once() -> None:
    calls: list[list[int]] = []

    def counting(parent: bytes, token_ids: Sequence[int], extra_keys: Sequence[bytes | str]) -> bytes:
        calls.append(list(token_ids))
        return hash_block(parent, token_ids, extra_keys)

    manager = KVCacheManager(CacheGroups(num_blocks=8, block_size=BLOCK_SIZE), hash_block=counting)
    request = live(range(12))
    for _ in range(3):
        manager.get_computed_blocks(request)
    compute(manager, request)
    assert calls == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_block_that_is_computed_again_replaces_the_free_one() -> None:
    """A prompt of two full blocks always computes the second one again, since its last token is left to compute."""
    manager, first, second = make_manager(4), live(range(8)), live(range(8), order=1)
    compute(manager, first)
    manager.kv_events.follow()
    manager.kv_events.take()
    manager.free(first)
    compute(manager, second)
    replaced, block = first.block_hashes[1], second.tables[0][1]
    assert manager._cache.cached_blocks[replaced] is block
    assert manager.kv_events.take() is None
    assert manager.tables.extend(second, 9) == [[1]]  # the one that lost its name is allocated next
    manager.check_integrity([second])


def test_a_block_that_is_computed_again_does_not_replace_one_in_use() -> None:
    manager, first, second = make_manager(4), live(range(8)), live(range(8), order=1)
    compute(manager, first)
    compute(manager, second)
    assert manager._cache.cached_blocks[first.block_hashes[1]] is first.tables[0][1]
    manager.check_integrity([first, second])
