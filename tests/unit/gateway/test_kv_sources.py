"""Whether blocks are fetched from another engine, and from which one."""

from dataclasses import replace

import pytest

from proa_gateway.routing.kv_sources import (
    FETCH_SECONDS,
    MAX_PAIRS,
    MEASUREMENT_SECONDS,
    FetchRates,
    Prefiller,
    Source,
    Target,
    choose_source,
    common_length,
    is_faster,
    remote_wait,
)

# 16,000 tokens per second, so a block takes 1 ms to compute; at 1 GB/s, 0.1 ms to fetch.
TARGET = Target(block_size=16, block_bytes=100_000, num_cached=0, num_waiting_tokens=0, prefill_rate=16_000.0)
SOURCE = Source(address="a", num_blocks=1000, rate=1e9, load=0)


@pytest.mark.parametrize(
    ("target", "source", "expected"),
    [
        ({}, {}, True),
        ({}, {"num_blocks": 10}, False),  # 11 ms to fetch, 10 to compute
        ({}, {"num_blocks": 20}, True),  # 12 ms, 20
        ({}, {"num_blocks": 15}, False),  # 11.5 ms, 15: less, but not less than 0.7 of it
        ({"num_waiting_tokens": 16_000}, {"num_blocks": 10}, True),  # behind a second of other prompts
        ({"num_cached": 1000}, {}, False),
        ({"num_cached": 990}, {}, False),  # 10 blocks more
        ({"num_cached": 900}, {}, True),
        ({}, {"rate": 1.6e8}, True),  # 0.635 s, 1 s
        ({}, {"rate": 1.4e8}, False),  # 0.724 s
        ({}, {"rate": 0.0}, False),  # its fetches fail
        ({"prefill_rate": 160_000.0}, {}, False),  # 0.11 s, 0.1 s
        ({"prefill_rate": 0.0}, {}, False),  # not known
        ({"prefill_rate": 0.0}, {"is_draining": True}, True),
        ({"prefill_rate": 0.0}, {"is_draining": True, "rate": 0.0}, False),
        ({"prefill_rate": 160_000.0}, {"is_draining": True}, False),  # computing is faster all the same
    ],
)
def test_blocks_are_fetched_if_that_is_clearly_faster_than_computing_them(
    target: dict[str, float], source: dict[str, float], expected: bool
) -> None:
    assert is_faster(replace(TARGET, **target), replace(SOURCE, **source)) is expected  # type: ignore[arg-type]


def chosen(*sources: Source) -> str | None:
    source = choose_source(TARGET, sources)
    return None if source is None else source.address


def test_the_source_with_most_blocks_is_chosen_from_which_fetching_is_faster() -> None:
    least, most = replace(SOURCE, address="least", num_blocks=500), replace(SOURCE, address="most")
    assert chosen(least, most) == "most"
    assert chosen(least, replace(most, rate=1e6)) == "least"
    assert chosen(replace(least, rate=1e6), replace(most, rate=1e6)) is None
    assert chosen() is None


def test_between_equal_sources_one_that_drains_is_chosen_then_the_least_loaded() -> None:
    busy, idle = replace(SOURCE, address="busy", load=9), replace(SOURCE, address="idle")
    draining = replace(SOURCE, address="draining", load=99, is_draining=True)
    assert chosen(busy, idle) == "idle"
    assert chosen(busy, idle, draining) == "draining"


def test_a_measured_rate_counts_until_it_is_old() -> None:
    now = [100.0]
    rates = FetchRates(1e9, lambda: now[0])
    assert rates.get(("a", "b")) == 1e9
    for _ in range(20):
        rates.add(("a", "b"), 10**9, 5 + FETCH_SECONDS)
    assert rates.get(("a", "b")) == pytest.approx(2e8, rel=0.01)
    assert rates.get(("b", "a")) == 1e9
    now[0] += MEASUREMENT_SECONDS
    assert rates.get(("a", "b")) == 1e9


def test_the_fixed_time_of_a_fetch_is_no_sign_of_a_slow_network() -> None:
    rates = FetchRates(1e9, lambda: 0.0)
    rates.add(("a", "b"), 10**7, 0.01 + FETCH_SECONDS)
    assert rates.get(("a", "b")) == pytest.approx(1e9)


def test_a_pair_whose_fetch_failed_is_avoided_for_a_while() -> None:
    now = [100.0]
    rates = FetchRates(1e9, lambda: now[0])
    rates.add_failure(("a", "b"))
    assert rates.get(("a", "b")) == 0.0
    now[0] += MEASUREMENT_SECONDS - 1
    assert rates.get(("a", "b")) == 0.0
    now[0] += 1
    assert rates.get(("a", "b")) == 1e9


def test_the_rates_of_the_oldest_pairs_are_forgotten_beyond_a_limit() -> None:
    rates = FetchRates(1e9, lambda: 0.0)
    for number in range(MAX_PAIRS + 1):
        rates.add_failure(("a", str(number)))
    assert rates.get(("a", "0")) == 1e9
    assert rates.get(("a", "1")) == 0.0


@pytest.mark.parametrize("shared", [0, 1, 6, 7])
def test_prompts_share_their_blocks_up_to_the_first_that_differs(shared: int) -> None:
    one = [b"%d" % number for number in range(7)]
    other = [*one[:shared], *(b"x%d" % number for number in range(9))]
    assert common_length(one, other) == common_length(other, one) == shared


def test_the_time_that_includes_computing_the_blocks_only_raises_a_rate() -> None:
    rates = FetchRates(1e9, lambda: 0.0)
    rates.add(("a", "b"), 10**7, 5.0, waited=True)
    assert rates.get(("a", "b")) == 1e9
    rates.add(("a", "b"), 10**9, 0.1 + FETCH_SECONDS, waited=True)
    assert rates.get(("a", "b")) == pytest.approx(5.5e9)


# A prompt of 8,000 tokens, which either engine computes in half a second, in steps of 2,000.
OWN = REMOTE = Prefiller(num_queued_tokens=0, step_tokens=2000, rate=16_000.0, load=3)


@pytest.mark.parametrize(
    ("own", "remote", "bandwidth", "expected"),
    [
        ({}, {}, 1e9, 0.125),  # its first step
        ({}, {"num_queued_tokens": 6400}, 1e9, 0.525),
        ({}, {"num_queued_tokens": 8000}, 1e9, None),  # the own engine is done when the other one begins
        ({"num_queued_tokens": 8000}, {"num_queued_tokens": 8000}, 1e9, 0.625),
        ({}, {"rate": 4000.0}, 1e9, 0.5),  # slower, but it keeps the own engine free
        ({}, {"rate": 4000.0, "num_queued_tokens": 1900}, 1e9, 0.975),
        ({}, {"rate": 4000.0, "num_queued_tokens": 2000}, 1e9, None),
        ({}, {}, 1.1e8, 0.125),
        ({}, {}, 9e7, None),  # sending 50 MB takes longer than computing
        ({"rate": 0.0}, {}, 1e9, 0.0),  # not known: by load
        ({}, {"rate": 0.0}, 1e9, 0.0),
        ({"rate": 0.0}, {"load": 4}, 1e9, None),
    ],
)
def test_a_prompt_is_computed_elsewhere_unless_the_own_engine_is_done_sooner(
    own: dict[str, float], remote: dict[str, float], bandwidth: float, expected: float | None
) -> None:
    engines = replace(OWN, **own), replace(REMOTE, **remote)  # type: ignore[arg-type]
    wait = remote_wait(*engines, num_tokens=8000, num_bytes=50_000_000, bandwidth=bandwidth)
    assert wait == (None if expected is None else pytest.approx(expected))
