"""Request deadlines: total time, time to first token, time between tokens."""

from collections.abc import Iterable, Mapping

from proa_gateway.config import Deadlines
from proa_gateway.engines.attempts import RequestAttempts
from proa_gateway.errors import DeadlineExceeded, EngineTimeout, InvalidRequest

HEADER = "x-request-timeout"


def request_timeout(headers: Mapping[str, str], maximum: float) -> float:
    """Return the seconds that a request may take: what its header says, at most `maximum`. Raises `InvalidRequest`."""
    text = headers.get(HEADER)
    if text is None:
        return maximum
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise InvalidRequest(f"{HEADER} must be a number of seconds above zero, got {text[:40]!r}.", param=HEADER)
    return min(seconds, maximum)


class RequestDeadlines:
    """Deadlines of one HTTP request. Times are the event loop's, in seconds. `ends_at`: the end of the total time."""

    def __init__(self, deadlines: Deadlines, ends_at: float) -> None:
        self._deadlines = deadlines
        self._ends_at = ends_at
        self._check_interval = min(deadlines.first_token, deadlines.next_token) / 4

    def until_next_check(self, now: float) -> float:
        return max(0.0, min(self._check_interval, self._ends_at - now))

    def check(self, sequences: Iterable[RequestAttempts], now: float) -> None:
        """Raises `DeadlineExceeded` after the total time, `EngineTimeout` if a sequence got no token in time."""
        if now >= self._ends_at:
            raise DeadlineExceeded("The answer was not finished within the request's time.")
        for attempts in sequences:
            limit = self._deadlines.next_token if attempts.num_received else self._deadlines.first_token
            if now - attempts.last_progress > limit:
                what = "next" if attempts.num_received else "first"
                raise EngineTimeout(f"The engine sent no {what} token within {limit:g} s.")
