"""CircuitBreaker: stops sending requests to an engine that failed several in a row.

closed      requests are sent
open        the last `THRESHOLD` requests failed: none are sent until the cooldown ends
half-open   the cooldown ended: one probe request is allowed; if it succeeds the breaker closes, else it opens again
"""

from enum import IntEnum

THRESHOLD = 5  # failures in a row
FIRST_COOLDOWN = 1.0  # seconds; doubled each time a probe fails
LAST_COOLDOWN = 30.0


class BreakerState(IntEnum):
    """The numbers are the values of the metric `proa_gateway_engine_breaker_state`."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class CircuitBreaker:
    """`now` is the time of any monotonic clock, in seconds."""

    __slots__ = ("_cooldown", "_num_failures", "_open_until")

    def __init__(self) -> None:
        self._num_failures = 0  # in a row
        self._cooldown = FIRST_COOLDOWN
        self._open_until: float | None = None

    def state(self, now: float) -> BreakerState:
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def record_sent(self, now: float) -> None:
        """A request is sent. If it is a probe, no other is allowed for a cooldown; after that the probe may have been
        aborted, so another one is."""
        if self._open_until is not None:
            self._open_until = now + self._cooldown

    def record_success(self) -> None:
        """The engine answered a request."""
        if self._num_failures:
            self._num_failures, self._cooldown, self._open_until = 0, FIRST_COOLDOWN, None

    def record_failure(self, now: float) -> None:
        """A session was lost with requests on it, or a request was rejected as unavailable."""
        self._num_failures += 1
        if self._num_failures < THRESHOLD:
            return
        if self._open_until is not None:
            self._cooldown = min(2 * self._cooldown, LAST_COOLDOWN)
        self._open_until = now + self._cooldown
