"""Rate limits of a key, by a clock that the test sets."""

import random
from contextlib import suppress

import pytest

from proa_gateway.admission.rate_limits import RateLimiter, RateLimits, TokenBucket
from proa_gateway.errors import RateLimited


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_one_minutes_limit_may_be_used_at_once_and_refills_evenly() -> None:
    bucket = TokenBucket(60, clock := Clock())
    bucket.take(60)
    assert bucket.level == 0
    assert bucket.seconds_until(1) == 1
    clock.now += 30
    assert bucket.level == 30
    clock.now += 3600
    assert bucket.level == 60


def test_a_negative_level_refills_first() -> None:
    bucket = TokenBucket(60, clock := Clock())
    bucket.take(90)
    assert bucket.seconds_until(10) == 40
    clock.now += 30
    assert bucket.level == 0


def test_more_than_the_bucket_holds_waits_for_a_full_bucket() -> None:
    bucket = TokenBucket(60, clock := Clock())
    assert bucket.seconds_until(1000) == 0
    bucket.take(30)
    assert bucket.seconds_until(1000) == 30
    clock.now += 30
    assert bucket.seconds_until(1000) == 0


def test_concurrent_requests_are_limited_until_one_ends() -> None:
    limiter = RateLimiter(RateLimits(max_concurrent_requests=2), Clock())
    with limiter.acquire(), limiter.acquire():
        with pytest.raises(RateLimited, match="2 concurrent requests") as refused, limiter.acquire():
            pass
        assert refused.value.headers == {"retry-after": "1"}
    assert limiter.num_requests == 0
    with limiter.acquire():
        pass


def test_requests_per_minute_are_limited_and_the_error_has_the_time_to_retry() -> None:
    limiter = RateLimiter(RateLimits(requests_per_minute=6), clock := Clock())
    for _ in range(6):
        with limiter.acquire():
            pass
    with pytest.raises(RateLimited) as refused, limiter.acquire():
        pass
    assert refused.value.headers == {"retry-after": "10"}
    assert refused.value.to_dict()["error"]["code"] == "rate_limit_exceeded"
    assert limiter.num_requests == 0
    clock.now += 10
    with limiter.acquire():
        pass


def test_unused_tokens_return_and_tokens_beyond_the_reservation_are_taken() -> None:
    limiter = RateLimiter(RateLimits(tokens_per_minute=600), clock := Clock())
    with limiter.acquire() as lease:
        lease.reserve(500)
        with limiter.acquire() as other, pytest.raises(RateLimited, match="600 tokens"):
            other.reserve(200)
        lease.used = 100
    assert limiter.headers()["x-ratelimit-remaining-tokens"] == "500"
    with limiter.acquire() as lease:
        lease.reserve(100)
        lease.used = 800
    assert limiter.headers()["x-ratelimit-remaining-tokens"] == "0"
    with limiter.acquire() as lease:
        with pytest.raises(RateLimited) as refused:
            lease.reserve(10)
        assert refused.value.retry_after == 31
        clock.now += 31
        lease.reserve(10)


def test_a_failed_request_returns_its_tokens_but_counts_as_a_request() -> None:
    limiter = RateLimiter(RateLimits(requests_per_minute=60, tokens_per_minute=600), Clock())
    with suppress(ZeroDivisionError), limiter.acquire() as lease:
        lease.reserve(500)
        raise ZeroDivisionError
    assert limiter.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "600",
        "x-ratelimit-reset-tokens": "0s",
    }


def test_a_long_reset_is_shown_in_minutes() -> None:
    limiter = RateLimiter(RateLimits(tokens_per_minute=60), Clock())
    with limiter.acquire() as lease:
        lease.reserve(60)
        lease.used = 372 + 60 - 60
    assert limiter.headers()["x-ratelimit-reset-tokens"] == "6m12s"


def test_changed_limits_keep_what_has_been_used() -> None:
    limiter = RateLimiter(RateLimits(requests_per_minute=10), Clock())
    for _ in range(8):
        with limiter.acquire():
            pass
    limiter.set_limits(RateLimits(requests_per_minute=20, tokens_per_minute=5))
    assert limiter.headers()["x-ratelimit-remaining-requests"] == "12"
    assert limiter.headers()["x-ratelimit-remaining-tokens"] == "5"
    limiter.set_limits(RateLimits(requests_per_minute=4))
    assert limiter.headers()["x-ratelimit-remaining-requests"] == "0"
    limiter.set_limits(RateLimits())
    assert limiter.headers() == {}


@pytest.mark.parametrize("seed", range(10))
def test_token_use_never_exceeds_the_limit_plus_one_bucket_plus_one_underestimate(
    seed: int,
) -> None:
    rng = random.Random(seed)
    limiter = RateLimiter(RateLimits(tokens_per_minute=6000), clock := Clock())
    start, used, unforeseen = clock.now, 0, 0
    for _ in range(2000):
        clock.now += rng.expovariate(5)
        try:
            with limiter.acquire() as lease:
                expected = rng.randint(1, 900)
                lease.reserve(expected)
                lease.used = rng.randint(0, 2 * expected)
                used += lease.used
                unforeseen = max(unforeseen, lease.used - expected)
        except RateLimited:
            continue
        assert used <= 6000 + (clock.now - start) * 100 + unforeseen
    assert used >= 0.5 * (clock.now - start) * 100
