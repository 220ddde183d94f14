"""RequestDeadlines: how long a request is waited for, in all and between its tokens.

Pure: the time comes with each call, in seconds by the event loop's clock. Knows nothing of engines or text.
"""

from collections.abc import Iterable, Mapping

from proa_gateway.config import Deadlines
from proa_gateway.engines.attempts import RequestAttempts
from proa_gateway.errors import DeadlineExceeded, EngineTimeout, InvalidRequest

HEADER = "x-request-timeout"


def time_limit(headers: Mapping[str, str], longest: float) -> float:
    """Seconds that a request may take, by its header; never more than `longest`. Raises `InvalidRequest`."""
    text = headers.get(HEADER)
    if text is None:
        return longest
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise InvalidRequest(f"{HEADER} must be a number of seconds above zero, got {text[:40]!r}.", param=HEADER)
    return min(seconds, longest)


class RequestDeadlines:
    """`ends_at`: when the whole request is given up."""

    def __init__(self, deadlines: Deadlines, ends_at: float) -> None:
        self._deadlines = deadlines
        self._ends_at = ends_at
        self._period = min(deadlines.first_token, deadlines.next_token) / 4

    def until_next_check(self, now: float) -> float:
        return max(0.0, min(self._period, self._ends_at - now))

    def check(self, journeys: Iterable[RequestAttempts], now: float) -> None:
        """Raises `DeadlineExceeded`, and `EngineTimeout` where a sequence has made no progress for too long."""
        if now >= self._ends_at:
            raise DeadlineExceeded("The answer was not finished within the request's time.")
        for journey in journeys:
            limit = self._deadlines.next_token if journey.num_received else self._deadlines.first_token
            if now - journey.since > limit:
                what = "next" if journey.num_received else "first"
                raise EngineTimeout(f"The engine sent no {what} token within {limit:g} s.")
