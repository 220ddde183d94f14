"""The measured rate of prefill: tokens of prompts a second, of recent steps."""

import pytest

from proa_engine.core.kv.host_tier import HostTierConfig
from proa_engine.core.timing.prefill_rate import PrefillRate
from support.core import Clock, CoreRun, make_request


def test_the_rate_is_unknown_before_a_prompt_is_computed() -> None:
    rate = PrefillRate()
    rate.add([], 1.0)
    assert rate.tokens_per_second == 0


def test_small_chunks_beside_decodes_change_little() -> None:
    rate = PrefillRate()
    rate.add([8000], 1.0)
    for _ in range(100):
        rate.add([20], 1 / 50)
    assert rate.tokens_per_second == pytest.approx(8000, rel=0.05)


def test_old_steps_are_forgotten() -> None:
    rate = PrefillRate()
    for _ in range(100):
        rate.add([8000], 1.0)
    for _ in range(100):
        rate.add([4000], 1.0)
    assert rate.tokens_per_second == pytest.approx(4000, rel=0.1)


def test_tokens_with_drafts_are_not_counted_and_prompts_as_short_as_they_are() -> None:
    run = CoreRun(num_speculative_tokens=3, accept=lambda num_drafts: 0)
    run.submit(make_request("a", prompt=range(20), max_tokens=9))
    run.finish()
    of_prompt = run.core.stats().prefill_tokens_per_second
    run.submit(make_request("b", prompt=[1, 2, 3], max_tokens=1))
    run.finish()
    weighted = (20 * 20 + 3 * 3) / (20 + 3)  # where both prompts' steps take a second
    assert run.core.stats().prefill_tokens_per_second == pytest.approx(weighted * of_prompt / 20, rel=1e-3)


def test_a_clock_that_goes_back_is_ignored() -> None:
    rate = PrefillRate()
    rate.add([100], 1.0)
    rate.add([100], -3.0)
    assert rate.tokens_per_second == 100


def test_a_step_begins_when_the_one_before_has_ended() -> None:
    """With each call of the clock a second later, a step of 20 tokens is finished 2 s after the one before, and 3 s
    after it was started."""
    run = CoreRun(max_num_batched_tokens=20, async_scheduling=True, clock=Clock())
    run.submit(make_request(prompt=range(100), max_tokens=1))
    run.finish()
    assert run.core.stats().prefill_tokens_per_second == pytest.approx(10, rel=0.01)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_the_core_reports_the_rate_of_its_steps(async_scheduling: bool) -> None:
    """Each call of the clock is a second later, and the fake executor waits for nothing."""
    run = CoreRun(max_num_batched_tokens=20, async_scheduling=async_scheduling)
    assert run.core.stats().prefill_tokens_per_second == 0
    run.submit(make_request(prompt=range(100), max_tokens=1))
    run.finish()
    assert 5 < run.core.stats().prefill_tokens_per_second <= 20


def test_stats_tell_the_host_tiers_share_of_cached_pages_and_its_rate() -> None:
    run = CoreRun(host=HostTierConfig(num_pages=10, load_bytes_per_second=3.0))
    run.submit(make_request(prompt=range(17), max_tokens=1))
    run.finish()
    stats = run.core.stats()
    assert (stats.host_cache_usage, stats.load_bytes_per_second, stats.num_fetching_reqs) == (0.4, 3.0, 0)
