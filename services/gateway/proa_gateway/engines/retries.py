"""Retries: whether a request that an engine turned away is offered to another, and after which pause.

Pure. Knows nothing of engines, tokens or clocks.
"""

MAX_ATTEMPTS = 3  # without a token between them; so a request that kills engines does not go round
FIRST_PAUSE = 0.05  # seconds
LAST_PAUSE = 1.0


class RetryBudget:
    """Keeps retries a share of the traffic, however many requests are turned away: each request earns a share of a
    retry, up to a reserve that a quiet gateway lives on."""

    __slots__ = ("_balance", "_reserve", "_share")

    def __init__(self, *, share: float = 0.2, reserve: float = 20.0) -> None:
        self._share = share
        self._reserve = reserve
        self._balance = reserve

    def earn(self) -> None:
        """A request came."""
        self._balance = min(self._reserve, self._balance + self._share)

    def spend(self) -> bool:
        """Whether there is a retry left; takes it."""
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True


def pause_before(retry: int, jitter: float) -> float:
    """Seconds before the `retry`-th retry, the first being 1: doubling, and spread by `jitter` (0 to 1) over the upper
    half, so that those turned away together do not come back together."""
    pause: float = min(FIRST_PAUSE * 2.0 ** min(retry - 1, 10), LAST_PAUSE)
    return pause * (0.5 + jitter / 2)
