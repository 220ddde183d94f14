"""`WriterResponse` and `ResponseWriter` inside a FastAPI application with the gateway's error handlers."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proa_gateway.errors import EngineUnavailable
from proa_gateway.http.errors import ErrorForms, error_handlers
from proa_gateway.http.streaming import CONNECTION, ResponseWriter, WriterResponse
from support.asgi import AsgiServer
from support.gateway import until

Respond = Callable[[ResponseWriter], Awaitable[None]]


class CountingMiddleware:
    """Wraps `send`, as Starlette's and FastAPI's layers do, and records the types of messages."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.seen: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting_send(message: Message) -> None:
            self.seen.append(message["type"])
            await send(message)

        await self._app(scope, receive, counting_send)


def make_app(respond: Respond) -> tuple[ASGIApp, CountingMiddleware]:
    app = FastAPI(exception_handlers=error_handlers(lambda request, status, error_type: None, ErrorForms()))  # type: ignore[arg-type]

    @app.get("/")
    async def route(request: Request) -> Response:
        return WriterResponse(respond)  # type: ignore[arg-type]

    counting = CountingMiddleware(app)
    return counting, counting


async def run(app: ASGIApp, server: AsgiServer) -> None:
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": [], CONNECTION: server}
    await app(scope, server.receive, server.send)


@pytest.mark.parametrize("size", [1, 15, 16, 1023, 1024, 70_000])
async def test_an_event_is_sent_when_write_returns_and_passes_no_middleware(size: int) -> None:
    server = AsgiServer()

    async def respond(writer: ResponseWriter) -> None:
        assert writer.blocked
        await writer.start_events()
        for letter in (b"a", b"b"):
            writer.write(letter * size)
            assert server.sent[-1] == letter * size
        await writer.end(b"end")

    app, counting = make_app(respond)
    await run(app, server)
    assert (server.status, server.sent) == (200, [b"a" * size, b"b" * size, b"end"])
    assert counting.seen == ["http.response.start", "http.response.body"]


async def test_a_writer_is_blocked_until_the_client_reads_again() -> None:
    server = AsgiServer()

    async def respond(writer: ResponseWriter) -> None:
        await writer.start_events()
        writer.write(b"a")
        assert not writer.blocked
        server.stop_reading()
        assert writer.blocked
        asyncio.get_running_loop().call_later(0.01, server.start_reading)
        await writer.drain()
        assert not writer.blocked
        writer.write(b"b")
        await writer.end(b"c")
        assert writer.blocked

    await run(make_app(respond)[0], server)
    assert server.sent == [b"a", b"b", b"c"]


async def test_a_client_that_reads_a_little_and_stops_again_still_blocks() -> None:
    server = AsgiServer()

    async def respond(writer: ResponseWriter) -> None:
        await writer.start_events()
        server.stop_reading()
        draining = asyncio.create_task(writer.drain())
        await asyncio.sleep(0)
        server.start_reading()
        server.stop_reading()
        await asyncio.sleep(0.01)
        assert writer.blocked
        assert not draining.done()
        server.start_reading()
        await draining
        await writer.end(b"end")

    await run(make_app(respond)[0], server)
    assert server.sent == [b"end"]


async def test_comments_are_written_while_there_are_no_events_and_the_client_reads() -> None:
    server = AsgiServer()
    comment = b": keep-alive\n\n"

    async def respond(writer: ResponseWriter) -> None:
        await writer.start_comments(0.02)
        await until(lambda: server.sent == [comment] * 2)
        assert writer.blocked
        await writer.drain()
        writer.write(b"a")
        await until(lambda: server.sent[-1] == comment)
        server.stop_reading()
        num_sent = len(server.sent)
        for _ in range(2):
            timer = writer.comment_timer
            await until(lambda timer=timer: writer.comment_timer is not timer)  # type: ignore[misc]
        assert len(server.sent) == num_sent
        server.start_reading()
        await writer.drain()
        await until(lambda: len(server.sent) > num_sent)
        await writer.end(b"b")

    await run(make_app(respond)[0], server)
    assert [each for each in server.sent if each != comment] == [b"a", b"b"]
    assert server.sent[-1] == b"b"


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_there_are_no_comments_after_a_response(is_cancelled: bool) -> None:
    server = AsgiServer()
    writers: list[ResponseWriter] = []

    async def respond(writer: ResponseWriter) -> None:
        writers.append(writer)
        await writer.start_comments(0.02)
        if is_cancelled:
            server.disconnect()
            await asyncio.Event().wait()
        await writer.end(b"end")

    await run(make_app(respond)[0], server)
    timer = writers[0].comment_timer
    assert timer is not None
    assert timer.cancelled()


@pytest.mark.parametrize("blocked", [False, True])
async def test_a_disconnect_cancels_the_response(blocked: bool) -> None:
    server = AsgiServer()
    outcome: list[str] = []

    async def respond(writer: ResponseWriter) -> None:
        await writer.start_events()
        if blocked:
            server.stop_reading()
        try:
            await (writer.drain() if blocked else asyncio.Event().wait())
        except asyncio.CancelledError:
            outcome.append("cancelled")
            raise

    running = asyncio.create_task(run(make_app(respond)[0], server))
    await until(lambda: server.status == 200)
    server.disconnect()
    await asyncio.wait_for(running, 5)
    assert outcome == ["cancelled"]


async def test_an_error_before_the_start_becomes_a_json_response() -> None:
    async def respond(writer: ResponseWriter) -> None:
        raise EngineUnavailable("No engine is ready.")

    server = AsgiServer()
    await run(make_app(respond)[0], server)
    assert server.status == 503
    assert json.loads(b"".join(server.sent))["error"]["code"] == "engine_unavailable"


async def test_send_json_is_one_response_with_its_length() -> None:
    server = AsgiServer()
    await run(make_app(lambda writer: writer.send_json(b'{"a": 1}'))[0], server)
    assert (server.status, server.sent) == (200, [b'{"a": 1}'])
