"""TCP connections between node 0 and the ranks of other nodes."""

import errno
import io
import os
import select
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock, Timer
from typing import Literal, TypeVar

from proa_engine.framing import Stream

T = TypeVar("T")

# A machine that is gone sends nothing. The connection ends when it has not answered for this long.
SILENT_SECONDS = 15
_IDLE_SECONDS = 5  # without traffic, then the kernel asks every `_PROBE_SECONDS` whether the other machine answers
_PROBE_SECONDS = 3


def open_stream(connection: socket.socket, wrap: Callable[[socket.socket], socket.socket]) -> Stream:
    """Return a stream over a new connection, which it owns. `wrap` does the TLS handshake; in plaintext it returns its
    argument. Raises `OSError`."""
    try:
        _configure(connection)
        wrapped = wrap(connection)
        return TlsStream(wrapped) if isinstance(wrapped, ssl.SSLSocket) else wrapped
    except BaseException:
        connection.close()
        raise


def _configure(connection: socket.socket) -> None:
    """Send small frames at once, and end the connection if the other machine does not answer for `SILENT_SECONDS`."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    # Also the limit of the probes above, and of data that is not acknowledged, for which there are no probes.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_SECONDS)


@contextmanager
def deadline(connection: socket.socket, seconds: float) -> Iterator[None]:
    """Shut the connection down if the block takes longer. Timeouts of a socket limit each call, not their sum."""
    handle = connection.dup()  # a TLS handshake takes the socket away from `connection`

    def shut_down() -> None:
        with suppress(OSError):
            handle.shutdown(socket.SHUT_RDWR)

    timer = Timer(seconds, shut_down)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        handle.close()


class TlsStream:
    """A `Stream` over TLS: one thread may read while another writes.

    An `SSLSocket` allows only one call at a time, so a blocking `recv` would keep writers waiting. Here the socket
    never blocks: calls are made under a lock, and threads wait for the socket without it.
    """

    def __init__(self, connection: ssl.SSLSocket) -> None:
        """Takes ownership of `connection`, whose handshake is done."""
        connection.setblocking(False)
        self._connection = connection
        self._calling = Lock()
        self._error = 0  # of the socket, for example that the other machine does not answer; 0: none
        self._is_closed = False
        self._num_users = 1  # this stream until it is closed, and its open files, as for a socket

    def makefile(self, _mode: Literal["rb"], /) -> io.BufferedReader:
        with self._calling:
            self._num_users += 1
        return io.BufferedReader(_Reader(self))

    def recv(self, size: int, /) -> bytes:
        return self._checked(self._call(lambda: self._connection.recv(size)))

    def recv_into(self, buffer: memoryview) -> int:
        return self._checked(self._call(lambda: self._connection.recv_into(buffer)))

    def sendall(self, data: bytes, /) -> None:
        """Write `data`. Only one thread may write at a time."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._call(lambda: self._connection.send(rest)) :]  # noqa: B023

    def shutdown(self, how: int, /) -> None:
        # `SSLSocket.shutdown` would let a later `recv` return what is encrypted.
        socket.socket.shutdown(self._connection, how)

    def close(self) -> None:
        """Close the connection once the files that `makefile` returned are closed too."""
        if not self._is_closed:
            self._is_closed = True
            self.release()

    def release(self) -> None:
        """Called once for the stream and once for each of its files."""
        with self._calling:
            self._num_users -= 1
            if not self._num_users:
                self._connection.close()

    def _call(self, operation: Callable[[], T]) -> T:
        while True:
            with self._calling:
                if not self._num_users:
                    raise OSError(errno.EBADF, "the connection is closed")
                try:
                    return operation()
                except ssl.SSLWantReadError:
                    event = select.POLLIN
                except ssl.SSLWantWriteError:
                    event = select.POLLOUT
            poll = select.poll()
            poll.register(self._connection, event)
            if any(found & select.POLLERR for _, found in poll.poll()):
                self._error = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or self._error

    def _checked(self, received: T) -> T:
        """Return what `recv` returned. Raises the socket's error, of which OpenSSL makes an end before Python 3.13."""
        if not received and self._error:
            raise OSError(self._error, os.strerror(self._error))
        return received


class _Reader(io.RawIOBase):
    def __init__(self, stream: TlsStream) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        return self._stream.recv_into(buffer)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._stream.release()
