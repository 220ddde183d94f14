"""CircuitBreaker: whether an engine is worth another request, from how the last ones went.

closed      requests go there
open        the last few all failed: nothing goes there for a while, longer each time
half-open   the while is over: one request may go and see; whether the breaker closes is for it to say

Pure: the time comes with each call. Knows nothing of what a request or a failure is.
"""

from enum import IntEnum

THRESHOLD = 5  # failures in a row
FIRST_COOLDOWN = 1.0  # seconds
LAST_COOLDOWN = 30.0


class BreakerState(IntEnum):
    """Ordered from well to ill; the numbers are a metric's values."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class CircuitBreaker:
    """`now` is any clock that does not go back, in seconds."""

    __slots__ = ("_cooldown", "_num_failures", "_open_until")

    def __init__(self) -> None:
        self._num_failures = 0  # in a row
        self._cooldown = FIRST_COOLDOWN
        self._open_until: float | None = None

    def state(self, now: float) -> BreakerState:
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def sent(self, now: float) -> None:
        """A request is on its way. The one that a half-open breaker lets through keeps others back for a cooldown: a
        probe that nobody waits for any more is replaced after that."""
        if self._open_until is not None:
            self._open_until = now + self._cooldown

    def succeeded(self) -> None:
        """The engine answered a request."""
        if self._num_failures:
            self._num_failures, self._cooldown, self._open_until = 0, FIRST_COOLDOWN, None

    def failed(self, now: float) -> None:
        """The engine failed a request through no fault of the request's."""
        self._num_failures += 1
        if self._num_failures < THRESHOLD:
            return
        if self._open_until is not None:
            self._cooldown = min(2 * self._cooldown, LAST_COOLDOWN)
        self._open_until = now + self._cooldown
