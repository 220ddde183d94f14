"""The host tier: what is stored, what is loaded and when. Blocks of four tokens.

The fake executor runs copies as early as they may run and compares what they read and wrote as late as they may.
"""

from typing import Any

import pytest

from proa.contract import EngineCoreRequest
from proa_engine.core.kv.host_tier import HostTierConfig
from proa_engine.core.operations import Sleep, SleepLevel, WakeUp
from proa_engine.core.types import Copies
from support.core import CoreRun, make_request
from support.fake_host import FakeHost

PROMPT = list(range(1, 18))  # four full blocks and a token


def run_with_host(num_pages: int = 64, num_states: int = 8, **settings: Any) -> CoreRun:
    sizes = {name: settings.pop(name) for name in ("max_step_pages", "min_load_tokens") if name in settings}
    host = HostTierConfig(num_pages=num_pages, num_states=num_states, **sizes)
    return CoreRun(**{"num_blocks": 12, "max_num_seqs": 16, "async_scheduling": False, "host": host, **settings})


def finish(run: CoreRun, *requests: EngineCoreRequest) -> list[int | None]:
    """Run requests to their ends, and all stores. Returns the numbers of cached tokens."""
    run.submit(*requests)
    run.finish()
    run.assert_complete(requests)
    return [run.outputs[request.request_id][0].num_cached_tokens for request in requests]


def evict(run: CoreRun, count: int | None = None) -> None:
    """Use blocks of the device at the same time, all by default, and cache none of them."""
    count = run.groups.num_blocks if count is None else count
    finish(run, *(make_request(f"evict {len(run.outputs)} {index}", [60], max_tokens=2) for index in range(count)))


def copies(run: CoreRun) -> list[Copies]:
    return [plan.copies for plan in run.executor.plans]


def host(run: CoreRun) -> FakeHost:
    assert run.executor.host is not None
    return run.executor.host


def test_what_the_device_has_evicted_is_loaded_from_the_host() -> None:
    run = run_with_host()
    assert finish(run, make_request("a", PROMPT, max_tokens=1)) == [0]
    evict(run)
    assert not run.cached_hashes
    assert finish(run, make_request("b", [*PROMPT, 5], max_tokens=1)) == [16]
    assert host(run).num_loaded == 4


def test_nothing_is_loaded_that_the_device_has() -> None:
    run = run_with_host()
    finish(run, make_request("a", PROMPT, max_tokens=1))
    assert finish(run, make_request("b", PROMPT, max_tokens=1)) == [16]
    assert host(run).num_loaded == 0


def test_a_block_is_not_stored_by_the_step_that_computes_it() -> None:
    run = run_with_host()
    run.submit(make_request("a", PROMPT, max_tokens=3))
    run.steps(2)
    assert [len(each.stores) for each in copies(run)] == [0, 4]


def test_a_block_is_stored_once() -> None:
    run = run_with_host()
    for name in "abc":
        finish(run, make_request(name, PROMPT, max_tokens=1))
    evict(run)
    finish(run, make_request("d", PROMPT, max_tokens=1))
    assert host(run).num_stored == 4


def test_stores_go_on_when_no_request_is_left_and_within_the_steps_limit() -> None:
    run = run_with_host(max_step_pages=1)
    finish(run, make_request("a", PROMPT, max_tokens=1))
    assert [len(each.stores) for each in copies(run)] == [0, 1, 1, 1, 1]


def test_a_request_does_not_start_in_the_step_of_its_load() -> None:
    run = run_with_host()
    finish(run, make_request("a", PROMPT, max_tokens=1))
    evict(run)
    num_before = len(run.executor.plans)
    finish(run, make_request("b", PROMPT, max_tokens=1))
    load, start, *_ = run.executor.plans[num_before:]
    assert len(load.copies.loads) == 4
    assert not load.new_requests
    assert [new.request_id for new in start.new_requests] == ["b"]
    assert start.new_requests[0].num_computed_tokens == 16


def test_loaded_blocks_are_found_one_step_later() -> None:
    """Also by another request, which does not wait for a load of its own."""
    run = run_with_host()
    finish(run, make_request("a", PROMPT, max_tokens=1))
    evict(run)
    run.submit(make_request("b", PROMPT, max_tokens=1))
    run.step()
    assert len(copies(run)[-1].loads) == 4
    assert finish(run, make_request("c", PROMPT, max_tokens=1)) == [16]
    assert host(run).num_loaded == 4


def test_a_load_that_takes_several_steps_delays_no_other_request() -> None:
    run = run_with_host(max_step_pages=1)
    finish(run, make_request("a", PROMPT, max_tokens=1))
    evict(run)
    num_before = len(run.executor.plans)
    run.submit(make_request("b", PROMPT, max_tokens=1), make_request("c", [50], max_tokens=6))
    run.step()
    stats, counters = run.core.stats(), run.core.counters()
    assert (stats.num_running_reqs, stats.num_waiting_reqs, counters.num_deferred_reqs) == (1, 1, 1)
    run.finish()
    plans = run.executor.plans[num_before:]
    assert [len(plan.copies.loads) for plan in plans[:5]] == [1, 1, 1, 1, 0]
    assert [[new.request_id for new in plan.new_requests] for plan in plans[:5]] == [["c"], [], [], [], ["b"]]
    assert run.outputs["b"][0].num_cached_tokens == 16


@pytest.mark.parametrize(("min_load_tokens", "num_cached"), [(16, 16), (17, 0)])
def test_a_shorter_gain_than_the_minimum_is_computed(min_load_tokens: int, num_cached: int) -> None:
    run = run_with_host(min_load_tokens=min_load_tokens)
    finish(run, make_request("a", PROMPT, max_tokens=1))
    evict(run)
    assert finish(run, make_request("b", PROMPT, max_tokens=1)) == [num_cached]


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (16, 12), (17, 16)])
def test_all_full_blocks_before_the_last_token_are_loaded(num_tokens: int, num_cached: int) -> None:
    run = run_with_host()
    finish(run, make_request("a", PROMPT, max_tokens=1))
    evict(run)
    assert finish(run, make_request("b", PROMPT[:num_tokens], max_tokens=1)) == [num_cached]


def test_a_host_that_is_smaller_than_a_request_has_its_last_pages_or_its_first() -> None:
    run = run_with_host(num_pages=2)
    finish(run, make_request("a", PROMPT, max_tokens=1))
    evict(run)
    assert finish(run, make_request("b", PROMPT, max_tokens=1)) == [0]


def test_the_hit_of_a_load_is_not_evicted_by_its_own_targets() -> None:
    run = run_with_host(num_blocks=5)
    finish(run, make_request("a", PROMPT, max_tokens=1))
    finish(run, make_request("other", range(30, 39), max_tokens=1))  # evicts the last two, and is younger than the hit
    assert finish(run, make_request("b", PROMPT, max_tokens=1)) == [16]
    assert host(run).num_loaded == 2


def test_a_page_that_is_loaded_is_not_overwritten_by_a_store_of_the_plan() -> None:
    run = run_with_host(num_pages=4)
    finish(run, make_request("a", PROMPT, max_tokens=1))
    evict(run)
    run.submit(make_request("new", range(30, 39), max_tokens=2))
    run.step()
    assert finish(run, make_request("b", PROMPT, max_tokens=1)) == [16]
    of_load = next(each for each in copies(run) if each.loads)
    assert not of_load.stores
    run.assert_complete([make_request("new", range(30, 39), max_tokens=2)])


def test_a_snapshot_is_not_given_away_while_it_is_stored() -> None:
    run = run_with_host(num_state_slots=2, max_num_seqs=1, max_num_batched_tokens=9)
    a, b = make_request("a", range(9), max_tokens=1), make_request("b", range(20, 29), max_tokens=1)
    finish(run, a, b)
    ((slot, _),) = copies(run)[1].state_stores
    (of_b,) = run.executor.plans[1].states.values()
    assert slot not in [written for _, written in of_b.writes]


def test_states_are_loaded_with_the_blocks_before_them() -> None:
    run = run_with_host(num_state_slots=3, max_num_seqs=2)
    finish(run, make_request("a", PROMPT, max_tokens=1))
    for name in "xyz":
        finish(run, make_request(name, range(20, 29), cache_salt=name, max_tokens=1))  # evict states
    evict_blocks = [make_request(f"e{index}", range(30, 52), cache_salt=f"{index}", max_tokens=1) for index in range(3)]
    finish(run, *evict_blocks)
    assert finish(run, make_request("b", PROMPT, max_tokens=1)) == [16]
    assert sum(len(each.state_loads) for each in copies(run)) == 1


@pytest.mark.parametrize("num_pages", range(2, 12))
def test_storing_a_checkpoint_evicts_the_one_that_names_its_pages(num_pages: int) -> None:
    """Checkpoints at every block share the blocks behind the window, and the host holds few of them."""
    run = run_with_host(num_pages, num_blocks=24, windows=(9,), checkpoint_interval=4)
    for index in range(3):
        finish(run, make_request(f"a{index}", [*range(12), *[index] * 9], max_tokens=12))
        evict(run)
    finish(run, make_request("b", [*range(12), *[1] * 9, 5, 5], max_tokens=2))


def test_windows_are_loaded_with_their_checkpoint() -> None:
    run = run_with_host(num_blocks=24, windows=(5,), max_num_seqs=24)
    finish(run, make_request("a", PROMPT, max_tokens=1))
    evict(run)
    assert not run.checkpoints
    assert finish(run, make_request("b", PROMPT, max_tokens=1)) == [16]


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_a_reset_forgets_blocks_on_their_way(num_steps: int) -> None:
    run = run_with_host(max_step_pages=1)
    finish(run, make_request("a", PROMPT, max_tokens=1))
    evict(run)
    run.submit(make_request("b", PROMPT, max_tokens=1))
    run.steps(num_steps)
    assert host(run).num_loaded == num_steps
    run.reset_prefix_cache()
    run.finish()
    assert run.outputs["b"][0].num_cached_tokens == 0
    run.assert_complete([make_request("b", PROMPT, max_tokens=1)])


def test_a_reset_forgets_loads_of_which_nothing_is_copied_yet() -> None:
    prompts = {"a": PROMPT, "b": PROMPT[::-1]}
    run = run_with_host(num_blocks=20, max_num_seqs=20, max_step_pages=1)
    finish(run, *(make_request(name, prompt, max_tokens=1) for name, prompt in prompts.items()))
    evict(run)
    again = [make_request(f"again {name}", prompt, max_tokens=1) for name, prompt in prompts.items()]
    run.submit(*again)
    run.step()
    run.reset_prefix_cache()
    run.finish()
    run.assert_complete(again)
    assert [run.outputs[request.request_id][0].num_cached_tokens for request in again] == [0, 0]


def test_loads_that_wait_give_way_to_the_head_of_the_queue() -> None:
    run = run_with_host(num_blocks=5, max_step_pages=1, policy="priority")
    finish(run, make_request("a", PROMPT, max_tokens=1))
    evict(run)
    later = make_request("later", PROMPT, max_tokens=1, priority=1)
    run.submit(later)
    run.step()
    assert run.core.stats().kv_cache_usage == 0.8
    finish(run, make_request("head", range(30, 46), max_tokens=1))
    started = {name: run.events(name)[1].timestamp for name in ("head", "later")}
    assert started["head"] < started["later"]
    run.assert_complete([later])


def test_loads_give_way_before_a_running_request_is_preempted() -> None:
    run = run_with_host(num_blocks=8, max_step_pages=1)
    finish(run, make_request("a", PROMPT, max_tokens=1))
    evict(run)
    growing = [make_request(f"growing {index}", [50, 51, index], max_tokens=4) for index in range(3)]
    run.submit(*growing)
    run.step()
    later = make_request("later", PROMPT, max_tokens=1)
    run.submit(later)
    run.step()
    assert run.core.stats().kv_cache_usage == 7 / 8
    run.finish()
    run.assert_complete([*growing, later])
    assert run.core.stats().num_preemptions == 0


def test_a_load_begins_only_if_its_request_could_start() -> None:
    run = run_with_host(num_blocks=6)
    finish(run, make_request("a", PROMPT, max_tokens=1))
    evict(run)
    running, later = make_request("running", [50, 51, 52, 53], max_tokens=4), make_request("later", PROMPT)
    run.submit(running)
    run.steps(2)
    run.submit(later)
    run.step()
    assert run.core.stats().kv_cache_usage == pytest.approx(2 / 6)
    run.finish()
    run.assert_complete([running, later])
    assert run.outputs["later"][0].num_cached_tokens == 16


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_an_abort_ends_a_load(num_steps: int) -> None:
    run = run_with_host(max_step_pages=1)
    finish(run, make_request("a", PROMPT, max_tokens=1))
    evict(run)
    run.submit(make_request("b", PROMPT, max_tokens=1))
    run.steps(num_steps)
    run.core.abort(["b"])
    run.finish()
    assert finish(run, make_request("c", PROMPT, max_tokens=1)) == [16]


def test_a_preempted_request_loads_what_it_had() -> None:
    run = run_with_host(num_blocks=8, max_num_seqs=2)
    requests = [make_request(name, [ord(name) % 60] * 13, max_tokens=8) for name in "ab"]
    run.submit(*requests)
    run.finish()
    run.assert_complete(requests)
    assert run.core.stats().num_preemptions > 0


def test_a_request_that_needs_every_token_computed_loads_nothing() -> None:
    run = run_with_host()
    finish(run, make_request("a", PROMPT, max_tokens=1))
    evict(run)
    assert finish(run, make_request("b", PROMPT, max_tokens=1, prompt_logprobs=0)) == [0]


@pytest.mark.parametrize(("level", "num_cached"), [(1, 16), (2, 0)])
def test_the_host_outlives_a_sleep_that_keeps_the_weights(level: SleepLevel, num_cached: int) -> None:
    run = run_with_host()
    run.submit(make_request("a", PROMPT, max_tokens=1))
    run.steps(1)
    asleep = run.core.operate(Sleep(level))
    run.finish()
    while not asleep.done():
        run.step()
    assert host(run).num_stored == 4
    run.core.operate(WakeUp())
    assert finish(run, make_request("b", PROMPT, max_tokens=1)) == [num_cached]
