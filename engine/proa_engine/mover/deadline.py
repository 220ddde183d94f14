"""Deadlines of exchanges over sockets.

A socket's own timeout limits one call, and any byte that comes ends that call: a peer that sends a byte a second is
never too late. Here every call gets what is left of the time of the whole exchange, or of the next unit in it.
"""

import io
import socket
import ssl
import time
from collections.abc import Callable, Sequence

_MAX_BUFFERS = 512  # in one call of `sendmsg`; Linux allows 1024


class Deadline:
    """Raises `TimeoutError` when an exchange takes more than `seconds`, or a unit of it more than `unit_seconds`.

    `end_unit` begins the time of the next unit. `unit_seconds` None: units have no limit of their own. `clock` returns
    seconds.
    """

    def __init__(
        self, seconds: float, unit_seconds: float | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._seconds = seconds
        self._unit_seconds = unit_seconds
        self._end = clock() + seconds
        self._unit_end = self._end
        self.end_unit()

    def end_unit(self) -> None:
        """A whole unit was exchanged."""
        if self._unit_seconds is not None:
            self._unit_end = self._clock() + self._unit_seconds

    def left(self) -> float:
        """Return the seconds until the first of both limits, above zero. Raises `TimeoutError` after it."""
        now = self._clock()
        if self._end <= now:
            raise TimeoutError(f"it took longer than {self._seconds:g} s")
        if self._unit_end <= now:
            raise TimeoutError(f"nothing whole came for {self._unit_seconds:g} s")
        return min(self._end, self._unit_end) - now


class TimedReader(io.RawIOBase):
    """Reads a socket until a deadline. Does not close the socket."""

    def __init__(self, connection: socket.socket, deadline: Deadline) -> None:
        self._connection = connection
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        self._connection.settimeout(self._deadline.left())
        try:
            return self._connection.recv_into(buffer)
        except TimeoutError:
            self._deadline.left()  # raises the error that names the limit
            raise


def send_all(connection: socket.socket, buffers: Sequence[bytes | memoryview], deadline: Deadline) -> None:
    """Send all buffers, many in one call. Raises `OSError`, also at the deadline."""
    waiting = [memoryview(buffer) for buffer in buffers]
    first = 0
    while first < len(waiting):
        connection.settimeout(deadline.left())
        if isinstance(connection, ssl.SSLSocket):  # it has no `sendmsg`
            num_sent = connection.send(waiting[first])
        else:
            num_sent = connection.sendmsg(waiting[first : first + _MAX_BUFFERS])
        while first < len(waiting) and num_sent >= len(waiting[first]):
            num_sent -= len(waiting[first])
            first += 1
        if num_sent:
            waiting[first] = waiting[first][num_sent:]
