"""EventWriter: sends one client its events, without a task or a queue between who writes and the socket.

An ASGI server's `send` only waits while the client takes nothing. So it is driven by hand: most calls end at once, and
one that would wait marks the writer blocked until `drain`, which the request's own task calls, has seen it through.
"""

import asyncio
import types
from collections.abc import Callable, Generator, Iterable
from typing import Any, Final

from starlette.types import Send

_SENT: Final = object()
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventWriter:
    """`blocked` until `start`, and while the client takes nothing; then `write` must not be called.

    `send` begins the response, `send_event` goes on with it. `wake` is called when a write has blocked. `patience`:
    seconds that a client may take nothing.
    """

    __slots__ = ("_patience", "_send", "_send_event", "_unfinished", "_wake", "blocked")

    def __init__(self, send: Send, send_event: Send, wake: Callable[[], None], *, patience: float) -> None:
        self._send = send
        self._send_event = send_event
        self._wake = wake
        self._patience = patience
        self._unfinished: tuple[Generator[Any, Any, Any], Any] | None = None
        self.blocked = True

    async def start(self, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *headers]})
        self.blocked = False

    def write(self, event: bytes) -> None:
        steps = self._send_event({"type": "http.response.body", "body": event, "more_body": True}).__await__()
        awaited = next(steps, _SENT)
        if awaited is _SENT:
            return
        self.blocked = True
        self._unfinished = (steps, awaited)
        self._wake()

    async def drain(self) -> None:
        """Until the client takes what was written. Raises `TimeoutError`."""
        if self._unfinished is not None:
            async with asyncio.timeout(self._patience):
                await _go_on(*self._unfinished)
            self._unfinished = None
            self.blocked = False

    async def end(self, last: bytes) -> None:
        """Sends the last events and closes the response. Raises `TimeoutError`."""
        await self.drain()
        self.blocked = True
        async with asyncio.timeout(self._patience):
            await self._send_event({"type": "http.response.body", "body": last, "more_body": False})


@types.coroutine
def _go_on(steps: Generator[Any, Any, Any], awaited: Any) -> Generator[Any, Any, None]:
    """The rest of a call whose first step has been driven by hand, as something that a task can await."""
    yield awaited
    yield from steps
