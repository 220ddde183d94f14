"""Throttle: limits the bytes a second of one thread."""

import time
from collections.abc import Callable

_BURST_SECONDS = 0.1  # of bytes that need not wait after a pause


class Throttle:
    """A token bucket. `clock` returns seconds, `sleep` waits for as many."""

    def __init__(
        self,
        bytes_per_second: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._due = clock()  # when all bytes so far may have been written

    def wait(self, num_bytes: int) -> None:
        """Wait until as many bytes may be written."""
        now = self._clock()
        if self._due > now:
            self._sleep(self._due - now)
        self._due = max(self._due, now - _BURST_SECONDS) + num_bytes / self._bytes_per_second
