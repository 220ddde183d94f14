"""Clients that disconnect, that do not read, or that still read when the gateway shuts down."""

import asyncio
import json
import signal
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken

from proa_gateway.config import Deadlines
from support.fake_engine import FakeEngine, Reply, say, tokenizer_files
from support.gateway import RunningGateway, chat_body, events_of, running_gateway, until
from support.processes import fake_engine_process, gateway_process
from support.tokenizers import byte_level_tokenizer

CHAT = "/v1/chat/completions"
ENDLESS = say("one two three ", repeat=True)
LONG = "0123456789" * 400


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(script=ENDLESS, max_model_len=1_000_000) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: FakeEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine) as gateway:
        yield gateway


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_disconnect_during_a_stream_aborts_in_the_engine(
    gateway: RunningGateway, engine: FakeEngine, choices: int
) -> None:
    async with gateway.http.stream("POST", CHAT, json=chat_body(stream=True, n=choices)) as response:
        async for event in events_of(response):
            if event["choices"][0]["delta"].get("content"):
                break
        await engine.until(lambda engine: engine.num_unfinished == choices)
    await engine.until(lambda engine: engine.num_unfinished == 0)
    assert len(engine.aborted) == choices
    assert engine.stats().kv_cache_usage == 0
    await until(lambda: gateway.gateway.metrics.requests_in_flight._value.get() == 0)


async def test_a_disconnect_before_the_first_token_aborts_in_the_engine(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    engine.step_delay = None
    for stream in (False, True):
        task = asyncio.create_task(gateway.chat(stream=stream))
        await engine.until(lambda engine: engine.num_unfinished == 1)
        task.cancel()
        await engine.until(lambda engine: engine.num_unfinished == 0)
    assert len(engine.aborted) == 2
    assert "proa_gateway_aborted_requests_total 2.0" in (await gateway.http.get("/metrics")).text


async def test_a_disconnect_frees_the_place_in_admission(engine: FakeEngine) -> None:
    engine.step_delay = None
    async with running_gateway(engine, max_concurrent_requests=1) as gateway:
        task = asyncio.create_task(gateway.chat())
        await engine.until(lambda engine: engine.num_unfinished == 1)
        assert (await gateway.chat()).status_code == 429
        task.cancel()
        await engine.until(lambda engine: engine.num_unfinished == 0)
        engine.step_delay = 0.0
        assert (await gateway.chat(max_tokens=1)).status_code == 200


def slow_client(port: int, body: dict[str, Any]) -> socket.socket:
    """A client that sends a request and reads nothing, with the smallest receive buffer that the system allows."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    data = json.dumps({**body, "stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\nConnection: close\r\n"
    client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    client.setblocking(False)
    return client


async def read_events(client: socket.socket) -> list[Any]:
    """The body until the gateway closes the connection, without chunk headers."""
    reader, writer = await asyncio.open_connection(sock=client)
    data = await reader.read()
    writer.close()
    chunks = []
    position = data.index(b"\r\n\r\n") + 4
    while position < len(data):
        start = data.index(b"\r\n", position) + 2
        size = int(data[position:start], 16)
        chunks.append(data[start : start + size])
        position = start + size + 2
    parts = [part.removeprefix(b"data: ") for part in b"".join(chunks).split(b"\n\n") if part]
    return [json.loads(part) for part in parts[:-1]] + [parts[-1].decode()]


@pytest.fixture
async def verbose_engine() -> AsyncIterator[FakeEngine]:
    """An engine whose tokens are texts of 4,000 characters."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken(LONG, special=False)])
    files = {**tokenizer_files(), "tokenizer.json": tokenizer.to_str().encode()}
    token_id = tokenizer.token_to_id(LONG)
    assert token_id is not None
    reply = Reply([token_id], repeat=True)
    async with FakeEngine(script=lambda request: reply, files=files, max_model_len=1_000_000) as engine:
        yield engine


async def test_a_slow_reader_gets_merged_deltas_and_loses_nothing(verbose_engine: FakeEngine) -> None:
    async with running_gateway(verbose_engine) as gateway:
        client = slow_client(gateway.port, chat_body(max_tokens=2500))
        await verbose_engine.until(lambda engine: engine.step_count > 0)
        # A slow reader delays neither the engine nor other clients.
        assert (await gateway.chat(max_tokens=2)).status_code == 200
        await verbose_engine.until(lambda engine: engine.num_unfinished == 0, 60)
        events = await read_events(client)
    texts = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(texts) == LONG * 2500
    assert len(texts) < 2400, "nothing was merged: the client was not slow"
    assert max(map(len, texts)) > len(LONG)
    assert events[-1] == "[DONE]"


async def test_a_client_that_reads_nothing_is_aborted_after_the_timeout(verbose_engine: FakeEngine) -> None:
    async with running_gateway(verbose_engine, deadlines=Deadlines(send=0.5, shutdown=5)) as gateway:
        client = slow_client(gateway.port, chat_body(max_tokens=900_000))
        await verbose_engine.until(lambda engine: engine.step_count > 0)
        await verbose_engine.until(lambda engine: engine.num_unfinished == 0, 60)
        assert len(verbose_engine.aborted) == 1
        client.close()
        assert (await gateway.chat(max_tokens=2)).status_code == 200


async def test_pipelined_requests_of_a_client_that_reads_nothing_free_their_places(verbose_engine: FakeEngine) -> None:
    deadlines = Deadlines(send=0.5, shutdown=5)
    async with running_gateway(verbose_engine, deadlines=deadlines, max_concurrent_requests=1) as gateway:
        body = json.dumps(chat_body(max_tokens=2500)).encode()  # 10 MB in one response
        head = f"POST {CHAT} HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
        client = socket.create_connection(("127.0.0.1", gateway.port))
        client.sendall((f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body) * 2)
        await verbose_engine.until(lambda engine: len(engine.requests) == 2 and engine.num_unfinished == 0, 60)
        async with asyncio.timeout(60):
            while (await gateway.chat(max_tokens=2)).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        client.close()


async def test_a_slow_reader_that_disconnects_frees_the_engine(verbose_engine: FakeEngine) -> None:
    async with running_gateway(verbose_engine) as gateway:
        client = slow_client(gateway.port, chat_body(max_tokens=900_000))
        await verbose_engine.until(lambda engine: engine.step_count > 2000, 60)
        client.close()
        await verbose_engine.until(lambda engine: engine.num_unfinished == 0)


async def test_many_streams_at_once_are_all_complete_and_equal(engine: FakeEngine) -> None:
    async with running_gateway(engine) as gateway:
        streams = await asyncio.gather(*(gateway.events(CHAT, chat_body(max_tokens=50)) for _ in range(64)))
    texts = {"".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1]) for events in streams}
    ids = byte_level_tokenizer().encode("one two three ").ids
    assert texts == {byte_level_tokenizer().decode((ids * 50)[:50])}


def read_stream(port: int, max_tokens: int, started: list[float]) -> list[str]:
    """The lines of a stream, however it ends."""
    lines: list[str] = []
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        try:
            with client.stream("POST", CHAT, json=chat_body(stream=True, max_tokens=max_tokens)) as response:
                for line in response.iter_lines():
                    lines.append(line)
                    if line and not started:
                        started.append(time.monotonic())
        except httpx.RemoteProtocolError:
            lines.append("cut")
    return lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_running_streams_end(number: signal.Signals) -> None:
    with (
        fake_engine_process("--repeat", "--step-delay", "0.02") as (_, address),
        gateway_process(address, "--drain-timeout", "20") as (gateway, port),
    ):
        started: list[float] = []
        stream = asyncio.create_task(asyncio.to_thread(read_stream, port, 60, started))
        await until(lambda: started)
        gateway.send_signal(number)
        lines = await stream
        assert lines[-2:] == ["data: [DONE]", ""]
        assert await asyncio.to_thread(gateway.wait, 10) == 0


async def test_streams_that_take_longer_than_the_drain_timeout_are_cut() -> None:
    with (
        fake_engine_process("--repeat", "--step-delay", "0.02") as (_, address),
        gateway_process(address, "--drain-timeout", "1") as (gateway, port),
    ):
        started: list[float] = []
        stream = asyncio.create_task(asyncio.to_thread(read_stream, port, 100_000, started))
        await until(lambda: started)
        gateway.terminate()
        assert await asyncio.to_thread(gateway.wait, 10) == 0
        assert "data: [DONE]" not in await stream
