"""For how long a connection waits for a client that does not read its response, or that goes on sending a body that
was refused."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
import uvicorn
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from proa_gateway.http.protocol import HttpProtocol
from proa_gateway.http.streaming import ResponseWriter
from support.asgi import AsgiServer


class Timers:
    """The `call_later` of an event loop. `pass_time` calls what is due."""

    def __init__(self) -> None:
        self._now = 0.0
        self._due: list[tuple[float, Callable[[], object], asyncio.Event]] = []

    def call_later(self, seconds: float, function: Callable[[], object]) -> Any:
        cancelled = asyncio.Event()
        self._due.append((self._now + seconds, function, cancelled))
        return cast(Any, type("Timer", (), {"cancel": staticmethod(cancelled.set)}))

    def pass_time(self, seconds: float) -> None:
        self._now += seconds
        due = [each for each in self._due if each[0] <= self._now]
        self._due = [each for each in self._due if each[0] > self._now]
        for _, function, cancelled in due:
            if not cancelled.is_set():
                function()

    create_task = staticmethod(asyncio.create_task)


class Transport:
    unread = 0
    state = "open"

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return self.unread

    def get_extra_info(self, name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return self.state != "open"

    def close(self) -> None:
        self.state = "closing"

    def abort(self) -> None:
        self.state = "aborted"


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse({}, 413)(scope, receive, send)


class Connection:
    """A connection that gives a client 60 seconds."""

    def __init__(self) -> None:
        self.timers, self.transport = Timers(), Transport()
        self.protocol = HttpProtocol(
            config=uvicorn.Config(refuse, log_config=None, timeout_keep_alive=75),
            server_state=ServerState(),
            app_state={},
            _loop=self.timers,  # type: ignore[arg-type]
        )
        self.protocol.connection_made(cast(asyncio.Transport, self.transport))
        self.protocol._stop_head_timer()

    def stream(self) -> ResponseWriter:
        writer = ResponseWriter(AsgiServer().send, self.protocol)
        self.protocol._writer = writer
        return writer

    async def answer(self, request: bytes) -> None:
        self.protocol.data_received(request)
        await asyncio.gather(*self.protocol.tasks)

    def buffer(self, num_bytes: int) -> None:
        """So many bytes wait in the transport's buffer, which is then full."""
        self.transport.unread = num_bytes
        self.protocol.pause_writing()


@pytest.fixture
async def connection() -> Connection:
    return Connection()


async def test_a_stream_without_room_ends_60_seconds_after_its_buffer_was_full(connection: Connection) -> None:
    writer = connection.stream()
    connection.buffer(70_000)
    draining = asyncio.create_task(writer.drain())
    for seconds in (59, 1):
        assert connection.transport.state == "open"
        connection.timers.pass_time(seconds)
        await asyncio.sleep(0)
    assert (connection.transport.state, draining.done()) == ("aborted", False)
    draining.cancel()  # as the response is, by the lost connection


async def test_reading_a_little_gives_a_stream_no_more_time(connection: Connection) -> None:
    connection.stream()
    connection.buffer(70_000)
    connection.timers.pass_time(59)
    connection.transport.unread = 69_999
    connection.timers.pass_time(1)
    assert connection.transport.state == "aborted"


async def test_a_stream_whose_client_reads_again_has_the_whole_time_again(connection: Connection) -> None:
    writer = connection.stream()
    for _ in range(3):
        connection.buffer(70_000)
        connection.timers.pass_time(59)
        connection.protocol.resume_writing()
        await writer.drain()
    connection.timers.pass_time(1000)
    assert connection.transport.state == "open"


async def test_a_whole_response_may_take_long_while_the_client_reads(connection: Connection) -> None:
    connection.buffer(10_000_000)
    for part in range(1, 10):
        connection.transport.unread = 10_000_000 - part
        connection.timers.pass_time(60)
        assert connection.transport.state == "open"
    connection.timers.pass_time(60)
    assert connection.transport.state == "aborted"


@pytest.mark.parametrize(("unread", "state"), [(100, "aborted"), (0, "closing")])
async def test_an_idle_connection_whose_last_response_is_not_read_is_closed(
    connection: Connection, unread: int, state: str
) -> None:
    connection.transport.unread = unread
    connection.protocol.timeout_keep_alive_handler()
    connection.timers.pass_time(59)
    assert connection.transport.state == "closing"
    connection.timers.pass_time(1)
    assert connection.transport.state == state


async def test_the_rest_of_a_refused_body_gives_its_connection_no_more_time(connection: Connection) -> None:
    await connection.answer(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(74):
        connection.protocol.data_received(b"a")
        connection.timers.pass_time(1)
        assert connection.transport.state == "open"
    connection.timers.pass_time(1)
    assert connection.transport.state == "closing"


async def test_a_connection_whose_refused_body_has_ended_is_used_again(connection: Connection) -> None:
    for count in (1, 2):
        await connection.answer(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nhello")
        assert connection.transport.written.count(b"HTTP/1.1 413") == count
        connection.timers.pass_time(50)
        connection.protocol.data_received(b"world")
        assert connection.transport.state == "open"
    connection.protocol.data_received(b"G")
    connection.protocol._stop_head_timer()
    connection.timers.pass_time(100)
    assert connection.transport.state == "open"
