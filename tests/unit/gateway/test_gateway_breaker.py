"""The circuit breaker: when an engine gets no requests, and how it gets them again."""

from proa_gateway.engines.circuit_breaker import FIRST_COOLDOWN, LAST_COOLDOWN, THRESHOLD, BreakerState, CircuitBreaker


def opened(now: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker()
    for _ in range(THRESHOLD):
        assert breaker.state(now) is BreakerState.CLOSED
        breaker.failed(now)
    return breaker


def test_it_opens_after_some_failures_in_a_row() -> None:
    assert opened().state(0.0) is BreakerState.OPEN


def test_a_success_between_failures_keeps_it_closed() -> None:
    breaker = CircuitBreaker()
    for _ in range(3 * THRESHOLD):
        breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.state(0.0) is BreakerState.CLOSED


def test_after_the_cooldown_one_request_may_go_and_see() -> None:
    breaker = opened()
    later = FIRST_COOLDOWN
    assert breaker.state(later - 0.01) is BreakerState.OPEN
    assert breaker.state(later) is BreakerState.HALF_OPEN
    breaker.sent(later)
    assert breaker.state(later) is BreakerState.OPEN
    breaker.succeeded()
    assert breaker.state(later) is BreakerState.CLOSED


def test_a_probe_that_says_nothing_is_replaced_after_a_cooldown() -> None:
    breaker = opened()
    breaker.sent(FIRST_COOLDOWN)
    assert breaker.state(2 * FIRST_COOLDOWN) is BreakerState.HALF_OPEN


def test_each_probe_that_fails_doubles_the_cooldown_up_to_a_limit() -> None:
    breaker, now, cooldowns = opened(), 0.0, []
    for _ in range(8):
        start = now
        while breaker.state(now) is BreakerState.OPEN:
            now += 0.25
        cooldowns.append(now - start)
        breaker.sent(now)
        breaker.failed(now)
    assert cooldowns[:4] == [FIRST_COOLDOWN, 2 * FIRST_COOLDOWN, 4 * FIRST_COOLDOWN, 8 * FIRST_COOLDOWN]
    assert cooldowns[-1] == LAST_COOLDOWN


def test_once_closed_it_is_as_new() -> None:
    breaker = opened()
    breaker.sent(FIRST_COOLDOWN)
    breaker.failed(FIRST_COOLDOWN)
    breaker.succeeded()
    for _ in range(THRESHOLD):
        assert breaker.state(100.0) is BreakerState.CLOSED
        breaker.failed(100.0)
    assert breaker.state(100.0 + FIRST_COOLDOWN) is BreakerState.HALF_OPEN
