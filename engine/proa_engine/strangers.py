"""Strangers: connections to an open port whose peers have not yet said who they are, or what they want."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock


class Strangers:
    """Limits how many there are at a time. Thread-safe.

    For one more, the oldest is shut down: if new ones were refused instead, peers that send nothing would keep all
    others away.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = Lock()
        self._num_held = 0  # ever
        self._held: dict[int, socket.socket] = {}  # by number, the oldest first

    @contextmanager
    def hold(self, connection: socket.socket) -> Iterator[None]:
        """Count the connection as a stranger's within the block, in which it may be shut down."""
        handle = connection.dup()  # a TLS handshake takes the socket away from `connection`
        with self._lock:
            number = self._num_held = self._num_held + 1
            if len(self._held) >= self._most:
                oldest = self._held.pop(next(iter(self._held)))
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._held[number] = handle
        try:
            yield
        finally:
            with self._lock:
                self._held.pop(number, None)
                handle.close()
