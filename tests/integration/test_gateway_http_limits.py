"""What a client may send before its request is known, and how slowly; and HTTP that is not as it should be."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from proa_gateway.http.protocol import HttpProtocol
from support.fake_engine import FakeEngine, say
from support.gateway import RunningGateway, chat_body, running_gateway

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
BODY = json.dumps(chat_body()).encode()
STREAM = json.dumps(chat_body(stream=True)).encode()
LENGTH = b"Content-Length: %d\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n"


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    async with FakeEngine(script=say("one two")) as engine, running_gateway(engine) as gateway:
        yield gateway


async def exchange(gateway: RunningGateway, *parts: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send the parts, each after the gateway has read the one before; return status, headers and the rest until the
    gateway closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    async with asyncio.timeout(20):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.02)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            rest = await reader.read()
        finally:
            writer.close()
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines if line)
    return int(first.split()[1]), headers, rest


def error_of(rest: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(rest)["error"]
    return error


async def still_serves(gateway: RunningGateway) -> bool:
    return (await gateway.chat(max_tokens=1)).status_code == 200


@pytest.mark.parametrize(
    "parts",
    [
        (MODELS + b"a: " + b"b" * 70_000 + b"\r\n\r\n",),
        (MODELS + b"a: ", b"b" * 40_000, b"b" * 40_000),  # it never ends
        (MODELS + b"".join(b"h%d: v\r\n" % each for each in range(101)) + b"\r\n",),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",),
        (b"GET /a", b"a" * 40_000, b"a" * 40_000),
    ],
)
async def test_large_heads_are_refused_while_they_arrive(gateway: RunningGateway, parts: tuple[bytes, ...]) -> None:
    status, headers, rest = await exchange(gateway, *parts)
    assert (status, headers["connection"]) == (431, "close")
    assert error_of(rest)["code"] == "headers_too_large"
    assert await still_serves(gateway)


async def test_heads_below_the_limits_are_served(gateway: RunningGateway) -> None:
    many = b"".join(b"h%d: %s\r\n" % (each, b"v" * 600) for each in range(97))
    status, *_ = await exchange(gateway, MODELS + many + b"Connection: close\r\n\r\n")
    assert status == 200


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"HELLO\r\n\r\n", "This is not HTTP/1.1"),
        (b"\x16\x03\x01\x02\x00\x01", "This is not HTTP/1.1"),  # TLS
        (b"GET /\x80 HTTP/1.1\r\nHost: a\r\n\r\n", "This is not HTTP/1.1"),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", "This is not HTTP/1.1"),
        (CHAT + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", "This is not HTTP/1.1"),
        (MODELS + b"Host: b\r\n\r\n", "more than one Host"),
        (CHAT + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"mod\r\nzz\r\n', "This is not HTTP/1.1"),
        (CHAT + b"Transfer-Encoding: xchunked\r\n\r\n5\r\n", "This is not HTTP/1.1"),
    ],
)
async def test_malformed_http_gets_an_error_object(gateway: RunningGateway, sent: bytes, message: str) -> None:
    status, headers, rest = await exchange(gateway, sent)
    assert (status, headers["content-type"]) == (400, "application/json")
    assert message in error_of(rest)["message"]
    assert await still_serves(gateway)


@pytest.mark.parametrize(
    "sent",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"Content-Length: 5, 6\r\n\r\nhello",
        b"Content-Length: +5\r\n\r\nhello",
        b"Content-Length: -5\r\n\r\nhello",
        b"Content-Length: 0x5\r\n\r\nhello",
        b"Content-Length: 5 5\r\n\r\nhello",
        b"Content-Length: 18446744073709551621\r\n\r\nhello",  # 5 in 64 bits
        b"Content-Length : 5\r\n\r\nhello",
        b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
        b"X: a\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"X: a\rContent-Length: 5\r\n\r\nhello",
        b"X: a\nContent-Length: 5\r\n\r\nhello",
        b"X: a\0b\r\nContent-Length: 5\r\n\r\nhello",
        b"Transfer-Encoding: chunked\r\n\r\n0x0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n-0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n10000000000000000\r\n\r\n",  # 0 in 64 bits
        b"Transfer-Encoding: chunked\r\n\r\n0\n\n",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloXX0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n0;a\nb\r\n\r\n",
    ],
)
async def test_no_request_is_read_behind_a_body_whose_end_is_not_certain(gateway: RunningGateway, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(CHAT + sent + MODELS + b"\r\n")
    async with asyncio.timeout(20):
        answer = await reader.read()  # until the gateway closes the connection
    writer.close()
    assert answer.count(b"HTTP/1.1 ") == answer.count(b"HTTP/1.1 400") <= 1
    assert b'"object":"list"' not in answer


async def test_malformed_http_for_messages_gets_anthropics_error(gateway: RunningGateway) -> None:
    *_, rest = await exchange(gateway, b"POST /v1/messages HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n")
    assert json.loads(rest)["type"] == "error"
    assert error_of(rest)["type"] == "invalid_request_error"


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_an_upgrade_is_ignored(gateway: RunningGateway, upgrade: bytes, chunked: bool) -> None:
    head = (
        CHAT + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: " + upgrade + b"\r\nHTTP2-Settings: AAMAAABkAARA\r\n"
    )
    if chunked:
        sent = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    else:
        sent = head + LENGTH % len(BODY) + b"\r\n" + BODY
    for parts in ((sent,), (sent[:-20], sent[-20:])):
        status, _, rest = await exchange(gateway, *parts, MODELS + b"Connection: close\r\n\r\n")
        assert status == 200
        assert b"one two" in rest
        assert b'"object":"list"' in rest  # the connection goes on with the next request


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_http_1_0_gets_no_chunks(gateway: RunningGateway, body: bytes) -> None:
    head = CHAT.replace(b"HTTP/1.1", b"HTTP/1.0") + LENGTH % len(body) + b"\r\n"
    status, headers, rest = await exchange(gateway, head + body)
    assert (status, headers["connection"]) == (200, "close")
    assert "transfer-encoding" not in headers
    if body is STREAM:
        assert rest.startswith(b"data: ")
        assert rest.endswith(b"data: [DONE]\n\n")
    else:
        assert len(rest) == int(headers["content-length"])


@pytest.mark.parametrize("sent", [b"GET /v1/models HT", MODELS + b"a"])
async def test_a_head_that_never_ends_is_given_up(
    gateway: RunningGateway, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HttpProtocol, "head_seconds", 0.2)
    status, _, rest = await exchange(gateway, sent)
    assert (status, error_of(rest)["code"]) == (408, "request_timeout")


async def test_a_connection_without_a_request_is_closed(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HttpProtocol, "head_seconds", 0.2)
    with pytest.raises(asyncio.IncompleteReadError):
        await exchange(gateway)


async def test_idle_connections_do_not_take_the_metrics_away(gateway: RunningGateway) -> None:
    async with AsyncExitStack() as stack:
        for begun in (b"", b"GET /metrics HT") * 32:
            _, idle = await asyncio.open_connection("127.0.0.1", gateway.port)
            stack.callback(idle.close)
            idle.write(begun)
        for _ in range(25):
            status, _, rest = await exchange(gateway, b"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n")
            assert (status, b"proa" in rest) == (200, True)


async def test_a_request_that_waits_for_its_answer_is_not_given_up(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HttpProtocol, "head_seconds", 0.05)
    one = CHAT + LENGTH % len(BODY) + b"\r\n" + BODY
    status, _, rest = await exchange(gateway, one, b"", b"", b"", one.replace(b"Host", b"Connection: close\r\nHost"))
    assert status == 200
    assert rest.count(b"one two") == 2


async def test_a_body_of_too_many_values_is_refused(gateway: RunningGateway) -> None:
    many = b"[" + b"[]," * 1_000_000 + b"[]]"
    response = await gateway.http.post(
        "/v1/chat/completions", content=many, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert "too many values" in response.json()["error"]["message"]
    assert await still_serves(gateway)
