"""CircuitBreaker: when it opens, what closes it, and how long it stays open."""

from proa_gateway.engines.client import FIRST_COOLDOWN, LAST_COOLDOWN, THRESHOLD, BreakerState, CircuitBreaker


def opened(now: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker()
    for _ in range(THRESHOLD):
        assert breaker.state(now) is BreakerState.CLOSED
        breaker.record_failure(now)
    return breaker


def test_it_opens_after_several_failures_in_a_row() -> None:
    assert opened().state(0.0) is BreakerState.OPEN


def test_a_success_between_failures_keeps_it_closed() -> None:
    breaker = CircuitBreaker()
    for _ in range(3 * THRESHOLD):
        breaker.record_failure(0.0)
        breaker.record_success()
    assert breaker.state(0.0) is BreakerState.CLOSED


def test_after_the_cooldown_one_probe_request_is_allowed() -> None:
    breaker = opened()
    later = FIRST_COOLDOWN
    assert breaker.state(later - 0.01) is BreakerState.OPEN
    assert breaker.state(later) is BreakerState.HALF_OPEN
    breaker.record_sent(later)
    assert breaker.state(later) is BreakerState.OPEN
    breaker.record_success()
    assert breaker.state(later) is BreakerState.CLOSED


def test_a_probe_without_a_result_is_replaced_after_a_cooldown() -> None:
    breaker = opened()
    breaker.record_sent(FIRST_COOLDOWN)
    assert breaker.state(2 * FIRST_COOLDOWN) is BreakerState.HALF_OPEN


def test_each_failed_probe_doubles_the_cooldown_up_to_a_limit() -> None:
    breaker, now, cooldowns = opened(), 0.0, []
    for _ in range(8):
        start = now
        while breaker.state(now) is BreakerState.OPEN:
            now += 0.25
        cooldowns.append(now - start)
        breaker.record_sent(now)
        breaker.record_failure(now)
    assert cooldowns[:4] == [FIRST_COOLDOWN, 2 * FIRST_COOLDOWN, 4 * FIRST_COOLDOWN, 8 * FIRST_COOLDOWN]
    assert cooldowns[-1] == LAST_COOLDOWN


def test_once_closed_it_forgets_failures_and_cooldown() -> None:
    breaker = opened()
    breaker.record_sent(FIRST_COOLDOWN)
    breaker.record_failure(FIRST_COOLDOWN)
    breaker.record_success()
    for _ in range(THRESHOLD):
        assert breaker.state(100.0) is BreakerState.CLOSED
        breaker.record_failure(100.0)
    assert breaker.state(100.0 + FIRST_COOLDOWN) is BreakerState.HALF_OPEN
