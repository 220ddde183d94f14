"""HTTP responses written without per-event overhead, and cancelled when the client disconnects.

The usual streaming response iterates over an async generator: a token goes into a queue, the event loop wakes the
response's task, and the task awaits a `send` that every layer of the application and the server has wrapped. A
`ResponseWriter` frames the event and gives it to the connection's transport instead: when `write` returns, the event is
in the socket, unless the client reads too slowly. Only the first and the last part of a response pass through `send`.

CPU time from an event's bytes to the transport: `benchmarks/http/response_writer.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

CONNECTION: Final = "proa.connection"  # key of the `Connection` in the ASGI scope
_EVENT_STREAM_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_COMMENT: Final = b": keep-alive\n\n"  # clients skip it
_CHUNK_HEADS: Final = tuple(b"%x\r\n" % size for size in range(1024))


@dataclass(frozen=True, slots=True)
class Content:
    """A whole response. `headers`: those other than its type and length, in lower case."""

    body: bytes
    media_type: bytes = b"application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()


class ByteStream(Protocol):
    def write(self, data: bytes) -> None:
        """Send the bytes, or buffer them until the client reads."""


class Connection(Protocol):
    """A client's connection.

    It notifies `writer` when the transport's buffer is full, when it has room again, and when the connection is lost.
    If the buffer stays full for too long, the connection ends itself.
    """

    writer: "ResponseWriter | None"

    @property
    def transport(self) -> ByteStream: ...


class ResponseWriter:
    """Writes one response: `send` or `send_json`, or `start_events`, any number of `write` and `drain`, then `end`.

    `blocked` is true before `start_events`, after `end`, while the client reads too slowly and when it is gone; `write`
    must not be called then. `comment_timer` is to be cancelled after the response. `has_started`: the status was sent.
    """

    __slots__ = (
        "_connection",
        "_has_room",
        "_is_chunked",
        "_is_idle",
        "_send",
        "_transport",
        "blocked",
        "comment_timer",
        "has_started",
    )

    def __init__(self, send: Send, connection: Connection, *, is_chunked: bool = True) -> None:
        """`is_chunked`: events are sent as chunks, which HTTP/1.0 does not have."""
        self._send = send
        self._connection = connection
        self._transport = connection.transport
        self._is_chunked = is_chunked
        self._has_room = asyncio.Event()  # the transport's buffer is not full
        self._has_room.set()
        self._is_idle = True  # nothing was written since the timer was started
        self.comment_timer: asyncio.TimerHandle | None = None
        self.blocked = True
        self.has_started = False

    async def send(self, content: Content) -> None:
        self.has_started = True
        headers = [
            (b"content-type", content.media_type),
            (b"content-length", b"%d" % len(content.body)),
            *content.headers,
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": content.body})

    async def send_json(self, body: bytes) -> None:
        await self.send(Content(body))

    async def start_events(self) -> None:
        """Begin a stream of events."""
        await self.start_comments(0.0)
        await self.drain()

    async def start_comments(self, keep_alive: float) -> None:
        """Begin a stream of events, the first of which comes after a `drain`. Comments are written before it and
        between events, so that the client receives something at least every `keep_alive` seconds; 0: none. Proxies
        close connections that are silent for a minute. Without effect a second time."""
        if self.has_started:
            return
        self.has_started = True
        self._connection.writer = self
        await self._send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM_HEADERS})
        if keep_alive:
            loop, period = asyncio.get_running_loop(), keep_alive / 2
            self.comment_timer = loop.call_later(period, self._write_comment, loop, period)

    @asynccontextmanager
    async def start_if_late(self, keep_alive: float) -> AsyncIterator[None]:
        """`start_comments` as soon as the context has taken `keep_alive` seconds; 0: never."""
        starting = list[asyncio.Task[None]]()
        loop = asyncio.get_running_loop()

        def start() -> None:
            starting.append(asyncio.create_task(self.start_comments(keep_alive)))

        timer = loop.call_later(keep_alive, start) if keep_alive else None
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            for task in starting:
                await task

    def write(self, event: bytes) -> None:
        self._is_idle = False
        if not self._is_chunked:
            self._transport.write(event)
            return
        size = len(event)
        head = _CHUNK_HEADS[size] if size < len(_CHUNK_HEADS) else b"%x\r\n" % size
        self._transport.write(head + event + b"\r\n")

    async def drain(self) -> None:
        """Wait until the client has read enough for the next `write`."""
        if self.blocked:
            while not self._has_room.is_set():
                await self._has_room.wait()
            self.blocked = False

    async def end(self, last: bytes) -> None:
        """Send the last events and end the response."""
        await self.drain()
        if not self._is_chunked:
            self._transport.write(last)
            last = b""
        self.blocked, self._connection.writer = True, None
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    def _write_comment(self, loop: asyncio.AbstractEventLoop, period: float) -> None:
        """Write a comment if there was no event in the last `period` seconds; then again after `period`."""
        if self._connection.writer is not self:  # after `end`
            return
        if self._is_idle and self._has_room.is_set():
            self.write(_COMMENT)
        self._is_idle = True
        self.comment_timer = loop.call_later(period, self._write_comment, loop, period)

    # The connection's notifications

    def pause(self) -> None:
        """Called when the transport's buffer is full, or when the connection is lost; the response is then about to be
        cancelled."""
        self.blocked = True
        self._has_room.clear()

    def resume(self) -> None:
        """Called when the client has read enough. `drain` then unblocks the writer."""
        self._has_room.set()


class WriterResponse(Response):
    """A response that `respond` writes. `respond` is cancelled when the client disconnects."""

    def __init__(self, respond: Callable[[ResponseWriter], Coroutine[Any, Any, None]]) -> None:
        super().__init__()
        self.respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = ResponseWriter(send, scope[CONNECTION], is_chunked=scope.get("http_version") != "1.0")
        responding = asyncio.create_task(self.respond(writer))
        watching = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait((responding, watching), return_when=asyncio.FIRST_COMPLETED)
            if responding.done():
                responding.result()
        finally:
            responding.cancel()
            watching.cancel()
            await asyncio.gather(responding, watching, return_exceptions=True)
            if writer.comment_timer is not None:
                writer.comment_timer.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
