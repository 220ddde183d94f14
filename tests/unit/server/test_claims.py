"""What gateways claim of an engine's cache is reported to the others."""

from collections import Counter

from proa.contract import SchedulerStats, SessionClaim
from proa_engine.server.claims import Claims


def of_others(claims: Claims, stream_id: int, num_retained: int = 0, **retained: int) -> tuple[int, float]:
    """`retained`: blocks by stream, as `one`, `two` and `three`."""
    numbers = {"one": 1, "two": 2, "three": 3}
    num_retained_of = Counter({numbers[name]: count for name, count in retained.items()})
    stats = SchedulerStats(num_retained_blocks=num_retained)
    claims.fill(stats, stream_id, num_retained_of.__getitem__)
    return stats.num_claimed_elsewhere, stats.longest_wait_elsewhere


def test_a_stream_is_told_what_the_others_claim() -> None:
    claims = Claims()
    claims.set(1, SessionClaim(10, 3.0))
    claims.set(2, SessionClaim(20, 1.0))
    assert of_others(claims, 1) == (20, 1.0)
    assert of_others(claims, 2) == (10, 3.0)
    assert of_others(claims, 3) == (30, 3.0)


def test_a_claim_replaces_the_one_before_and_ends_with_its_stream() -> None:
    claims = Claims()
    claims.set(1, SessionClaim(10, 3.0))
    claims.set(1, SessionClaim(5, 0.0))
    assert of_others(claims, 2) == (5, 0.0)
    claims.end(1)
    claims.end(2)
    assert of_others(claims, 2) == (0, 0.0)


def test_blocks_that_several_streams_retain_count_once() -> None:
    claims = Claims()
    for stream_id in (1, 2):
        claims.set(stream_id, SessionClaim(10))
    assert of_others(claims, 1, num_retained=10, one=10, two=10) == (0, 0.0)
    assert of_others(claims, 1, num_retained=16, one=10, two=10) == (6, 0.0)


def test_blocks_that_are_claimed_but_not_retained_yet_count() -> None:
    claims = Claims()
    claims.set(1, SessionClaim(10))
    claims.set(2, SessionClaim(10))
    assert of_others(claims, 1, num_retained=13, one=10, two=3) == (10, 0.0)


def test_blocks_that_a_stream_will_release_do_not_count() -> None:
    claims = Claims()
    claims.set(1, SessionClaim(10))
    claims.set(2, SessionClaim(4))
    assert of_others(claims, 1, num_retained=20, one=10, two=10) == (4, 0.0)
    claims.set(2, SessionClaim(0))
    assert of_others(claims, 1, num_retained=20, one=10, two=15) == (0, 0.0)
