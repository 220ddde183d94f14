"""Streams whose next token takes long: they have a status, and comments between events, so that proxies and clients
keep the connection."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from proa_gateway.config import Deadlines
from support.fake_engine import FakeEngine, say
from support.gateway import PATIENT, RunningGateway, chat_body, running_gateway

COMMENT = ": keep-alive"
INTERVAL = 0.05
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat_body(),
    "/v1/completions": {"model": "fake", "prompt": "Hi"},
    "/v1/responses": {"model": "fake", "input": "Hi"},
    "/v1/messages": {"model": "fake", "messages": MESSAGES, "max_tokens": 50},
}
FAILURES = {
    "/v1/chat/completions": "engine_timeout",
    "/v1/completions": "engine_timeout",
    "/v1/responses": "response.failed",
    "/v1/messages": "timeout_error",
}


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(script=say("one two three")) as engine:
        yield engine


def streamed(gateway: RunningGateway, path: str) -> Any:
    return gateway.http.stream("POST", path, json={**BODIES[path], "stream": True})


async def comments(lines: AsyncIterator[str], num: int) -> list[str]:
    """Return the lines up to the last of so many comments."""
    found: list[str] = []
    while found.count(COMMENT) < num:
        found.append(await anext(lines))
    return found


async def finish(engine: FakeEngine, lines: AsyncIterator[str]) -> list[str]:
    """Let the engine go on, and return the remaining lines."""
    engine.step_delay = 0.0
    await engine.step()
    return [line async for line in lines]


def kinds(lines: Sequence[str]) -> list[list[str]]:
    """The fields of each event."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [sorted(json.loads(each)) for each in data if each != "[DONE]"]


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_waits_for_its_first_token_has_a_status_and_comments(engine: FakeEngine, path: str) -> None:
    async with running_gateway(engine, sse_keep_alive_interval=INTERVAL) as gateway:
        async with streamed(gateway, path) as response:
            undisturbed = [line async for line in response.aiter_lines()]
        assert COMMENT not in undisturbed
        engine.step_delay = None
        async with streamed(gateway, path) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            before = await comments(lines, 2)
            found = await finish(engine, lines)
    assert {*before} == {COMMENT, ""}  # the events tell how many tokens were cached, so they come with the first token
    assert kinds(found) == kinds(undisturbed)


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_after_the_status_is_an_event(engine: FakeEngine, path: str) -> None:
    engine.step_delay = None
    deadlines = Deadlines(first_token=0.4, next_token=0.4)
    async with running_gateway(engine, deadlines=deadlines, sse_keep_alive_interval=INTERVAL) as gateway:
        async with streamed(gateway, path) as response:
            assert response.status_code == 200
            lines = [line async for line in response.aiter_lines()]
        assert COMMENT in lines
        assert any(FAILURES[path] in line for line in lines), lines
        await engine.until(lambda engine: engine.num_unfinished == 0)


async def test_without_an_interval_the_status_is_that_of_the_error(engine: FakeEngine) -> None:
    engine.step_delay = None
    deadlines = Deadlines(first_token=0.4, next_token=0.4)
    async with (
        running_gateway(engine, deadlines=deadlines, sse_keep_alive_interval=0) as gateway,
        streamed(gateway, "/v1/chat/completions") as response,
    ):
        assert response.status_code == 504


async def test_the_clients_skip_the_comments(engine: FakeEngine) -> None:
    engine.step_delay = None
    async with (
        running_gateway(engine, sse_keep_alive_interval=INTERVAL) as gateway,
        gateway.anthropic_client() as client,
        client.messages.stream(model="fake", messages=MESSAGES, max_tokens=50) as message,
        await gateway.openai.completions.create(model="fake", prompt="Hi", stream=True) as completion,
        streamed(gateway, "/v1/chat/completions") as last,
    ):
        lines = last.aiter_lines()
        await comments(lines, 2)  # the other streams have had some then
        await finish(engine, lines)
        assert "".join([event.choices[0].text async for event in completion]) == "one two three"
        assert await message.get_final_text() == "one two three"


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_waits_for_capacity_has_a_status_and_comments_and_an_error_is_an_event(path: str) -> None:
    async with (
        FakeEngine(max_num_seqs=1, step_delay=None) as engine,
        running_gateway(engine, sse_keep_alive_interval=INTERVAL, deadlines=replace(PATIENT, queue=0.5)) as gateway,
        streamed(gateway, path),
        streamed(gateway, path),
    ):
        await engine.until(lambda engine: engine.num_unfinished == 2)
        async with streamed(gateway, path) as response:
            assert response.status_code == 200
            lines = [line async for line in response.aiter_lines()]
    assert COMMENT in lines
    assert "No engine had room within" in "".join(lines)
