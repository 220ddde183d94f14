"""`WriterResponse` and `ResponseWriter` inside a FastAPI application with the gateway's error handlers."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proa_gateway.errors import EngineUnavailable
from proa_gateway.http import error_handlers
from proa_gateway.streaming import ResponseWriter, ServerSendMiddleware, WriterResponse
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
    app = FastAPI(exception_handlers=error_handlers(lambda request, status, error_type: None))  # type: ignore[arg-type]

    @app.get("/")
    async def route(request: Request) -> Response:
        return WriterResponse(respond)  # type: ignore[arg-type]

    counting = CountingMiddleware(app)
    return ServerSendMiddleware(counting), counting


async def run(app: ASGIApp, server: AsgiServer) -> None:
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}
    await app(scope, server.receive, server.send)


async def start(writer: ResponseWriter, blocked: list[str] | None = None, *, write_timeout: float = 5.0) -> None:
    calls = [] if blocked is None else blocked
    await writer.start_events(lambda: calls.append("blocked"), write_timeout=write_timeout)


async def test_an_event_is_sent_when_write_returns_and_passes_no_middleware() -> None:
    server = AsgiServer()

    async def respond(writer: ResponseWriter) -> None:
        assert writer.blocked
        await start(writer)
        for number in range(3):
            writer.write(b"%d" % number)
            assert server.sent[-1] == b"%d" % number
        await writer.end(b"end")

    app, counting = make_app(respond)
    await run(app, server)
    assert (server.status, server.sent) == (200, [b"0", b"1", b"2", b"end"])
    assert counting.seen == ["http.response.start"]


async def test_a_write_to_a_client_that_reads_nothing_blocks_until_it_reads() -> None:
    server = AsgiServer()
    blocked: list[str] = []

    async def respond(writer: ResponseWriter) -> None:
        await start(writer, blocked)
        writer.write(b"a")
        assert not writer.blocked
        server.reading.clear()
        writer.write(b"b")
        assert writer.blocked
        assert blocked == ["blocked"]
        asyncio.get_running_loop().call_later(0.01, server.reading.set)
        await writer.drain()
        assert not writer.blocked
        writer.write(b"c")
        await writer.end(b"d")

    await run(make_app(respond)[0], server)
    assert server.sent == [b"a", b"b", b"c", b"d"]


async def test_a_client_that_reads_nothing_for_the_write_timeout_raises() -> None:
    server = AsgiServer()
    raised: list[str] = []

    async def respond(writer: ResponseWriter) -> None:
        await start(writer, write_timeout=0.05)
        server.reading.clear()
        writer.write(b"a")
        try:
            await writer.drain()
        except TimeoutError:
            raised.append("drain")

    await run(make_app(respond)[0], server)
    assert raised == ["drain"]


async def test_a_last_event_that_the_client_does_not_read_raises_too() -> None:
    server = AsgiServer()
    raised: list[str] = []

    async def respond(writer: ResponseWriter) -> None:
        await start(writer, write_timeout=0.05)
        server.reading.clear()
        try:
            await writer.end(b"end")
        except TimeoutError:
            raised.append("end")

    await run(make_app(respond)[0], server)
    assert raised == ["end"]


@pytest.mark.parametrize("blocked", [False, True])
async def test_a_disconnect_cancels_the_response(blocked: bool) -> None:
    server = AsgiServer()
    outcome: list[str] = []

    async def respond(writer: ResponseWriter) -> None:
        await start(writer)
        if blocked:
            server.reading.clear()
        writer.write(b"a")
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
