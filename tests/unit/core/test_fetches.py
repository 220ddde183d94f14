"""Blocks that new requests fetch from another engine: what waits for what, and what a page may hold when."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest

from proa.contract import EngineCoreRequest, FinishReason, KvSource
from proa_engine.core.kv.host_tier import HostTierConfig
from proa_engine.core.kv.mover import FetchJob
from proa_engine.core.operations import Sleep, WakeUp
from support.core import CoreRun, make_request
from support.fake_grammar import fake_grammar
from support.fake_mover import Never

PROMPT = tuple(range(1, 34))  # eight full blocks of 4, and one token
PEER = KvSource(addresses=("peer:50061",))


def make_run(*, num_pages: int = 100, min_load_tokens: int = 1, num_blocks: int = 64, block_size: int = 4) -> CoreRun:
    host = HostTierConfig(num_pages=num_pages, min_load_tokens=min_load_tokens)
    return CoreRun(host=host, fetches=Never(), num_blocks=num_blocks, block_size=block_size)


def run_with_source(**sizes: int) -> CoreRun:
    """A run whose source has the prompt's blocks."""
    source, run = make_run(block_size=sizes.get("block_size", 4)), make_run(**sizes)
    source.submit(make_request(prompt=PROMPT))
    source.finish()
    assert source.mover is not None
    assert run.mover is not None
    run.mover.learn(source.mover)
    return run


def fetching(request_id: str = "a", prompt: Sequence[int] = PROMPT, source: KvSource = PEER) -> EngineCoreRequest:
    return replace(make_request(request_id, prompt), kv_source=source)


def jobs(run: CoreRun) -> list[FetchJob]:
    assert run.mover is not None
    return list(run.mover.jobs.values())


def test_a_request_starts_with_the_blocks_that_were_fetched() -> None:
    run, request = run_with_source(), fetching()
    run.submit(request)
    run.steps(3)
    (job,) = jobs(run)
    assert (len(job.chain), job.num_held, len(job.pages)) == (8, 0, 8)
    assert not run.batches(), "it waits for its blocks"
    run.finish()
    run.assert_complete([request])
    assert run.last().num_cached_tokens == 32
    fetch = run.last().fetch
    assert fetch is not None
    assert fetch.num_tokens == 32


def test_what_does_not_come_is_computed() -> None:
    run, request = make_run(), fetching()
    run.submit(request)
    run.finish()
    run.assert_complete([request])
    assert run.last().num_cached_tokens == 0


def test_only_missing_blocks_are_fetched() -> None:
    run = run_with_source()
    run.submit(make_request("first", PROMPT[:13]))
    run.finish()
    run.submit(fetching())
    run.steps(3)
    (job,) = jobs(run)
    assert (job.num_held, len(job.pages)) == (3, 5)
    run.finish()
    assert run.last().num_cached_tokens == 32


def test_fewer_tokens_than_the_least_load_are_computed() -> None:
    run = run_with_source(min_load_tokens=33)
    run.submit(fetching())
    run.steps(1)
    assert not jobs(run)
    assert run.batches() == [{"a": 32}]


def test_a_source_is_asked_for_no_more_blocks_than_it_has() -> None:
    run = run_with_source()
    run.submit(fetching(source=replace(PEER, num_blocks=3)))
    run.steps(1)
    assert len(jobs(run)[0].chain) == 3


def test_a_job_takes_the_pages_that_are_free() -> None:
    run, request = run_with_source(num_pages=5), fetching()
    run.submit(request)
    run.steps(1)
    assert len(jobs(run)[0].pages) == 5
    run.finish()
    run.assert_complete([request])
    assert run.last().num_cached_tokens == 20


def test_two_requests_with_the_same_prompt_wait_for_one_job() -> None:
    run, requests = run_with_source(), [fetching("a"), fetching("b")]
    run.submit(*requests)
    run.steps(2)
    assert len(jobs(run)) == 1
    run.core.abort(["a"])
    run.finish()
    run.assert_complete(requests[1:])
    assert run.last("b").num_cached_tokens == 32


OTHER = KvSource(addresses=("other:50061",))


def test_a_request_does_not_wait_for_another_source() -> None:
    """That of the first one may have nothing."""
    run, requests = run_with_source(), [fetching("a", source=OTHER), fetching("b")]
    run.submit(*requests)
    run.steps(2)
    assert [job.addresses for job in jobs(run)] == [OTHER.addresses, PEER.addresses]
    run.finish()
    run.assert_complete(requests)
    assert run.last("b").num_cached_tokens == 32


def test_a_request_does_not_wait_for_one_that_is_more_patient() -> None:
    run, requests = run_with_source(), [fetching("a", source=replace(PEER, wait_ms=60_000)), fetching("b")]
    run.submit(*requests)
    run.steps(2)
    assert [job.wait_ms for job in jobs(run)] == [60_000, 2000]
    run.finish()
    run.assert_complete(requests)


def test_a_request_waits_for_one_with_a_longer_prompt() -> None:
    run = run_with_source()
    run.submit(fetching("a"), fetching("b", PROMPT[:30]))
    run.steps(2)
    assert len(jobs(run)) == 1


def test_the_longest_wait_has_a_limit() -> None:
    run = run_with_source()
    run.submit(fetching(source=replace(PEER, wait_ms=2**32 - 1)))
    run.steps(1)
    assert jobs(run)[0].wait_ms == 60_000


@pytest.mark.parametrize(("tokens_per_second", "max_ms"), [(0.0, 2064), (320.0, 3000), (0.01, 600_000)])
def test_a_job_may_take_ten_times_as_long_as_computing_its_blocks(tokens_per_second: float, max_ms: int) -> None:
    run = run_with_source()
    run.core._scheduler.prefill_rate.tokens_per_second = tokens_per_second
    run.submit(fetching())
    run.steps(1)
    assert jobs(run)[0].max_ms == max_ms


def test_no_more_jobs_run_than_a_source_answers() -> None:
    run = make_run(num_pages=1000, num_blocks=2000)
    requests = [fetching(str(index), [1000 + index] * 5) for index in range(257)]
    run.submit(*requests)
    run.steps(2)
    assert len(jobs(run)) == 256
    assert run.batches()[0] == {"256": 5}, "it is computed"


def test_a_request_waits_for_its_grammar_and_its_blocks() -> None:
    for compile_first in (True, False):
        run = run_with_source()
        assert run.mover is not None
        grammar = fake_grammar(seed=1, length=3, fuel=10**9, run=0)
        params = make_request(prompt=PROMPT, grammar=grammar)
        run.submit(replace(params, kv_source=PEER))
        run.steps(1)
        compile_all, fetch_all = run.grammars.compile_all, partial(run.mover.advance, to_end=True)
        for act in (compile_all, fetch_all) if compile_first else (fetch_all, compile_all):
            assert not run.batches()
            act()
            run.steps(2)
        assert run.batches()
        run.finish()
        assert run.last().num_cached_tokens == 32


def abort(run: CoreRun) -> None:
    run.core.abort(["a"])


def fall_asleep(run: CoreRun) -> None:
    run.core.operate(Sleep(1))


def reset(run: CoreRun) -> None:
    run.reset_prefix_cache()


@pytest.mark.parametrize("cancel", [abort, fall_asleep, reset])
def test_a_cancelled_fetch_keeps_its_pages_until_the_mover_answers(cancel: Callable[[CoreRun], None]) -> None:
    run = run_with_source(num_pages=8)
    run.submit(fetching())
    run.steps(1)
    cancel(run)
    run.steps(1)
    assert run.finish_reason() is (None if cancel is reset else FinishReason.ABORT)
    assert len(jobs(run)) == 1, "the mover has not answered"
    run.core.operate(WakeUp())
    run.submit(make_request("b", range(20)))
    run.steps(20)
    assert run.executor.host is not None
    assert run.executor.host.num_stored == 0, "no page is free"
    assert run.mover is not None
    run.mover.advance(to_end=True)
    run.submit(make_request("c", range(20, 40)))
    run.finish()
    assert run.executor.host.num_stored > 0


@pytest.mark.parametrize("wait", [True, False])
def test_after_sleep_at_level_2_blocks_are_fetched_from_engines_that_slept_at_the_same_time(wait: bool) -> None:
    run = run_with_source(num_pages=8)
    asleep = run.core.operate(Sleep(2, wait, since=123.0))
    run.steps(1)
    assert asleep.done()
    run.core.operate(WakeUp())
    run.submit(fetching())
    run.steps(2)
    assert [job.since for job in jobs(run)] == [123.0]


def test_a_pinned_page_is_not_evicted() -> None:
    """A job goes on behind the pages that are held, so stores must leave these as they are."""
    run, request = run_with_source(num_pages=12), fetching()
    run.submit(make_request("first", PROMPT[:13], max_tokens=1))
    run.finish()
    run.submit(request)
    run.steps(1)
    (job,) = jobs(run)
    held = set(job.chain[: job.num_held])
    assert len(held) == 3
    run.submit(*(make_request(f"other {index}", [40 + index] * 20, max_tokens=1) for index in range(4)))
    run.steps(20)
    assert run.executor.host is not None
    assert run.executor.host.num_stored > 3 + 4, "the pages that are not held were stored in several times"
    assert held < run.hashes_in_host[0]
    run.finish()
    run.assert_complete([request])


def test_a_host_full_of_pinned_pages_skips_stores_and_fetches_nothing() -> None:
    run = run_with_source(num_pages=8)
    run.submit(fetching())
    run.steps(1)
    assert len(jobs(run)[0].pages) == 8
    other = fetching("b", [*PROMPT[::-1]])
    run.submit(other, make_request("c", range(30)))
    run.steps(30)
    assert len(jobs(run)) == 1, "no page is free for another"
    run.assert_complete([other, make_request("c", range(30))])
    host = run.core.counters().cache.host
    assert host is not None
    assert host.num_skipped_stores > 0
    run.finish()
    run.assert_complete([fetching()])
    assert run.last().num_cached_tokens == 32


@pytest.mark.parametrize(("num_tokens", "num_fetched"), [(1, 0), (2, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_all_full_blocks_before_the_last_token_are_fetched(num_tokens: int, num_fetched: int) -> None:
    run, request = run_with_source(block_size=16), fetching(prompt=PROMPT[:num_tokens])
    run.submit(request)
    run.steps(1)
    assert [len(job.pages) for job in jobs(run)] == [num_fetched] * bool(num_fetched)
    run.finish()
    run.assert_complete([request])
    assert run.last().num_cached_tokens == 16 * num_fetched


def test_a_preempted_request_does_not_fetch_again() -> None:
    run = run_with_source(num_blocks=13, num_pages=8)
    requests = [fetching("a"), make_request("b", range(12), max_tokens=20)]
    run.submit(*requests)
    run.finish()
    run.assert_complete(requests)
    assert run.core.stats().num_preemptions > 0
    counts = run.core.counters().cache.fetches
    assert counts is not None
    assert counts.num_fetches == 1


def test_a_reset_forgets_blocks_on_their_way() -> None:
    run, request = run_with_source(), fetching()
    run.submit(request)
    run.steps(1)
    run.reset_prefix_cache()
    run.steps(1)
    run.finish()
    run.assert_complete([request])
    assert run.last().num_cached_tokens == 0


def test_a_reset_between_a_jobs_end_and_its_addition_forgets_it() -> None:
    """The answer is behind the reset in the core's queue."""
    run, request = run_with_source(), fetching()
    run.submit(request)
    run.steps(1)
    run.reset_prefix_cache()
    assert run.mover is not None
    run.mover.advance(to_end=True)
    run.finish()
    run.assert_complete([request])
    assert run.last().num_cached_tokens == 0


def test_a_reset_forgets_what_was_added_before_it() -> None:
    run, request = run_with_source(), fetching()
    run.submit(request)
    run.steps(1)
    assert run.mover is not None
    run.mover.advance(to_end=True)
    run.reset_prefix_cache()
    run.finish()
    run.assert_complete([request])
    assert run.last().num_cached_tokens == 0
