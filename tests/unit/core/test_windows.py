"""Tables with windows: what is freed, and where a later request continues. Blocks of four tokens."""

from collections.abc import Sequence

import pytest

from proa.blocks import checkpoint_positions
from proa.contract import EngineCoreRequest
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.kv.kv_cache_manager import MISS, KVCacheManager
from proa_engine.core.operations import ResetPrefixCache
from proa_engine.core.request import Request
from support.core import CoreRun, hash_block, make_request


def make_manager(*windows: int, num_blocks: int = 64, interval: int = 0, min_junction: int = 4) -> KVCacheManager:
    groups = CacheGroups(
        num_blocks=num_blocks,
        block_size=4,
        windows=windows,
        checkpoint_interval=interval,
        min_junction=min_junction,
        max_step_tokens=8,
    )
    return KVCacheManager(groups, hash_block=hash_block, root_hash=b"root", checkpoint_positions=checkpoint_positions)


def live(prompt: Sequence[int], order: int = 0) -> Request:
    request = make_request(f"r{order}", prompt)
    return Request(request, order=(0, order), max_num_tokens=1000, eos_token_ids=frozenset())


def join(manager: KVCacheManager, request: Request, *, step: int = 8) -> int:
    """Compute all known tokens of a request, `step` at a time. Returns the number of tokens that it has found."""
    hit = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, request.num_tokens, hit) is not None
    request.num_computed_tokens = hit.num_tokens
    while (start := request.num_computed_tokens) < request.num_tokens:
        end = min(start + step, request.num_tokens)
        if end > request.num_slots:
            assert manager.tables.extend(request, end) is not None
        request.num_computed_tokens = end
        manager.cache_blocks([(request, start)])
    manager.check_integrity([request])
    return hit.num_tokens


def run_alone(manager: KVCacheManager, prompt: Sequence[int], order: int = 0) -> int:
    request = live(prompt, order)
    num_found = join(manager, request)
    manager.free(request)
    request.num_computed_tokens = 0
    manager.check_integrity([])
    return num_found


def finish(run: CoreRun, *requests: EngineCoreRequest) -> list[int | None]:
    """Run requests to their ends. Returns the numbers of cached tokens."""
    run.submit(*requests)
    run.finish()
    run.assert_complete(requests)
    return [run.outputs[request.request_id][0].num_cached_tokens for request in requests]


def test_only_blocks_behind_the_window_are_held() -> None:
    manager, request = make_manager(6), live(range(50))
    join(manager, request)
    full, window = request.tables
    assert len(full) == 13
    assert all(full)
    assert request.first_columns == [10]  # of token 48, where the last step began
    assert [block is not None for block in window] == [False] * 10 + [True] * 3


def test_a_prompt_gets_the_windows_blocks_at_once_and_later_chunks_replace_them() -> None:
    manager = make_manager(6, num_blocks=25 + 6)  # 25 of table 0; six cover a window of 6 and a step of 8
    assert join(manager, live(range(100))) == 0


def test_hits_are_referenced_before_new_blocks_are_allocated() -> None:
    manager = make_manager(4, num_blocks=40)
    run_alone(manager, [*range(8), 50])
    holder = live([*range(8), *range(20, 60)], 1)
    assert join(manager, holder) == 8  # holds the blocks of table 0, and not the window's any more
    checkpoint = manager.get_computed_blocks(live([*range(8), 60])).checkpoint
    assert checkpoint is not None
    ((tail,),) = checkpoint.window_blocks
    assert tail.ref_count == 0
    others = manager._device.blocks.get_new_blocks(manager._device.blocks.num_free_blocks - 3)
    manager._device.blocks.demote(tail)  # the next block to be allocated
    late = live([*range(8), 60], 2)
    assert manager.allocate_slots(late, 9, manager.get_computed_blocks(late)) is not None
    assert late.tables[1][1] is tail
    assert tail not in late.tables[0]
    manager._device.blocks.free_blocks(others)
    late.num_computed_tokens = 9
    manager.check_integrity([holder, late])


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("window", [2, 3, 4, 5])
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_rejected_drafts_across_a_block_boundary_find_their_window(
    async_scheduling: bool, window: int, length: int
) -> None:
    run = CoreRun(windows=(window,), num_speculative_tokens=5, accept=lambda _: 0, async_scheduling=async_scheduling)
    finish(run, make_request("a", range(length), max_tokens=30))


def test_known_blocks_behind_the_last_checkpoint_are_no_hit_until_a_second_request_has_made_one() -> None:
    manager = make_manager(4)
    assert run_alone(manager, range(20)) == 0  # checkpoints at 16 and 20
    assert [run_alone(manager, [*range(12), 50 + order], order) for order in (1, 2)] == [0, 12]
    assert run_alone(manager, [*range(16), 60], 3) == 16


def test_a_junction_nearer_than_the_minimum_is_no_checkpoint() -> None:
    manager = make_manager(4, min_junction=16)
    run_alone(manager, range(20))
    assert [run_alone(manager, [*range(12), order, *range(50, 58)], order) for order in (1, 2)] == [0, 0]


def test_a_request_that_is_preempted_at_its_prompts_end_continues_there() -> None:
    manager, request = make_manager(5), live(range(9))
    manager.allocate_slots(request, 9, manager.get_computed_blocks(request))
    request.num_computed_tokens = 8  # a chunk ends at the last boundary
    manager.cache_blocks([(request, 0)])
    manager.free(request)
    request.num_computed_tokens = 0
    assert manager.get_computed_blocks(request).num_tokens == 8


def test_blocks_that_replace_a_preempted_requests_are_given_in_the_same_plan() -> None:
    """The step in flight still reads them; it runs before the step that writes them."""
    run = CoreRun(num_blocks=19, windows=(5,), policy="priority", max_num_batched_tokens=8, max_model_len=64)
    late, first = make_request("late", range(40), priority=1), make_request("first", range(7), max_tokens=20)
    run.submit(late, first)
    run.finish()
    run.assert_complete([late, first])
    taken = [plan for plan in run.executor.plans if "late" in plan.preempted_request_ids]
    assert any(known.new_block_ids for plan in taken for known in plan.cached_requests)


def test_an_evicted_block_of_one_window_removes_its_checkpoint_and_no_block_of_table_0() -> None:
    manager = make_manager(2, 3, 5, 9, 17, interval=8, num_blocks=100)
    manager.kv_events.follow()
    run_alone(manager, range(17))
    checkpoints = manager._cache.checkpoints
    manager.kv_events.take()
    (at_8, at_16), names = checkpoints, dict(manager._cache.cached_blocks)
    evicted = checkpoints[at_16].window_blocks[3][-1]
    manager._device.blocks.demote(evicted)
    manager._device.blocks.free_blocks(manager._device.blocks.get_new_blocks(1))
    assert list(checkpoints) == [at_8]
    batch = manager.kv_events.take()
    assert batch is not None
    assert not batch.changes
    assert list(batch.checkpoints.removed) == [at_16]
    assert manager._cache.cached_blocks == names
    manager.check_integrity([])
    hit = manager.get_computed_blocks(live(range(17)))
    assert (hit.num_tokens, hit.num_known_tokens) == (8, 16)


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("windows", [(), (2,), (3,), (4,), (100,), (2, 9)])
@pytest.mark.parametrize("length", [1, 4, 5, 16, 17])
def test_prompts_around_block_boundaries_and_windows_of_any_size(
    async_scheduling: bool, windows: tuple[int, ...], length: int
) -> None:
    run = CoreRun(windows=windows, async_scheduling=async_scheduling)
    requests = [make_request(name, range(length), max_tokens=9) for name in "abc"]
    found = [finish(run, request)[0] for request in requests]
    assert found == [0, *[(length - 1) // 4 * 4] * 2]


def test_reset_while_a_step_is_in_flight_leaves_no_checkpoint_of_the_old_weights() -> None:
    run = CoreRun(windows=(5,), checkpoint_interval=4)
    request = make_request("a", range(9), max_tokens=20)
    run.submit(request)
    run.steps(5)
    assert run.checkpoints
    run.core.operate(ResetPrefixCache())
    run.finish()
    assert not run.checkpoints
    assert not run.cached_hashes


def test_checkpoints_of_a_shared_prompt_do_not_accumulate() -> None:
    manager = make_manager(64, num_blocks=80)
    prompt = list(range(24))
    for order in range(1000):
        run_alone(manager, [*prompt, 100 + order, 200 + order, 7, 7, 7], order)
    links = max(len(block.checkpoints or ()) for block in manager._device.blocks.blocks)
    assert links <= len(manager._cache.checkpoints) <= 80
    assert run_alone(manager, [*prompt, 1, 2, 3, 4, 5]) == 24


@pytest.mark.parametrize(("windows", "num_requests"), [((1024,) * 5, 42), ((40_000,) * 5, 8)])
def test_as_many_long_requests_run_as_the_windows_leave_room_for(windows: tuple[int, ...], num_requests: int) -> None:
    """Gemma-3-12B on an H200: 99.2 GiB in blocks of 1 MiB, and requests of 32k tokens. Without windows, 8 fit."""
    groups = CacheGroups(num_blocks=101_580, block_size=16, windows=windows, max_step_tokens=2048)
    manager, running = KVCacheManager(groups), list[Request]()
    while True:
        request = live([0] * 32_768, len(running))
        if manager.allocate_slots(request, request.num_tokens, MISS) is None:
            break
        running.append(request)
        for end in (*range(2048, 32_769, 2048), 32_770):
            assert end <= request.num_slots or manager.tables.extend(request, end) is not None
            request.num_computed_tokens = end
            request.token_ids += [0] * (end - request.num_tokens)
    assert len(running) == num_requests
    manager.check_integrity(running)
