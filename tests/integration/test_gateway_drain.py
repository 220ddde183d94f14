"""Running sequences of an engine that drains move to engines that fetch their blocks."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from proa.engine.v1 import service_pb2
from support.fake_engine import FakeEngine, say
from support.gateway import PATIENT, RunningGateway, events_of, running_gateway, until
from support.scrape import Scrape
from support.tokenizers import byte_level_tokenizer

PROMPT = [5 + index % 200 for index in range(500)]
TEXT = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "


@pytest.fixture
async def engines() -> AsyncIterator[list[FakeEngine]]:
    """Two engines that exchange blocks and repeat a text, a token in 2 ms."""
    movers: dict[str, FakeEngine] = {}
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                FakeEngine(movers=movers, script=say(TEXT, repeat=True), step_delay=0.002, max_loras=1)
            )
            for _ in range(2)
        ]


@pytest.fixture
async def gateway(engines: list[FakeEngine]) -> AsyncIterator[RunningGateway]:
    async with running_gateway(*engines, deadlines=replace(PATIENT, failover=5.0)) as gateway:
        yield gateway


class Stream:
    """A completion that is read as it comes."""

    def __init__(self, gateway: RunningGateway, **fields: Any) -> None:
        self.text = ""
        self.events: list[Any] = []
        body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True, **fields}
        self.task = asyncio.create_task(self._read(gateway, body))

    async def _read(self, gateway: RunningGateway, body: dict[str, Any]) -> str:
        async with gateway.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for event in events_of(response):
                self.events.append(event)
                if event != "[DONE]":
                    assert "error" not in event, json.dumps(event)
                    self.text += "".join(choice["text"] for choice in event["choices"] if choice["index"] == 0)
        return self.text


def text_of(num_tokens: int) -> str:
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode(TEXT).ids
    return str(tokenizer.decode((ids * num_tokens)[:num_tokens]))


def leaving_and_other(engines: list[FakeEngine]) -> tuple[FakeEngine, FakeEngine]:
    leaving, other = sorted(engines, key=lambda one: -len(one.requests))
    return leaving, other


async def begin_move(
    gateway: RunningGateway, engines: list[FakeEngine], num_characters: int
) -> tuple[Stream, FakeEngine, FakeEngine]:
    """Let an engine drain when its stream has more than so many characters.

    Returns the stream, the engine that it leaves, and the other one, which has its request and runs no step until its
    `step_delay` is set.
    """
    stream = Stream(gateway)
    await until(lambda: len(stream.text) > num_characters)
    leaving, other = leaving_and_other(engines)
    other.step_delay = None
    await leaving.drain()
    await other.until(lambda engine: bool(engine.requests))
    return stream, leaving, other


async def moved(gateway: RunningGateway) -> Scrape:
    return Scrape((await gateway.http.get("/metrics")).text)


async def test_a_stream_moves_without_a_lost_or_doubled_token(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    stream = Stream(gateway)
    await until(lambda: len(stream.text) > 50)
    leaving, other = leaving_and_other(engines)
    await leaving.drain()
    assert await stream.task == text_of(400)
    (request,) = other.requests
    num_resumed = len(request.resumed_token_ids) // 4
    assert num_resumed > 10
    assert list(request.kv_source.addresses) == [leaving.address]
    assert request.kv_source.num_blocks == 0, "also those of the output"
    assert other.num_computed_tokens <= 32
    assert len(leaving.aborted) == 1
    await leaving.until(lambda engine: engine.num_sessions == 0)
    page = await moved(gateway)
    assert page.value("proa_gateway_moved_sequences_total", reason="drain") == 1
    assert page.value("proa_gateway_kv_sources_total", kind="drain") == 1
    assert page.value("proa_gateway_failovers_total") == 0
    assert page.value("proa_gateway_retried_requests_total") == 0


async def test_a_draining_engine_goes_on_until_its_blocks_are_fetched(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    stream, leaving, other = await begin_move(gateway, engines, 20)
    await asyncio.sleep(0.1)
    before = len(stream.text)
    await asyncio.sleep(0.1)
    assert leaving.num_unfinished == 1
    assert leaving.num_sessions == 1
    assert len(stream.text) == before, "its outputs are dropped"
    other.step_delay = 0.0
    assert await stream.task == text_of(400)
    await leaving.until(lambda engine: engine.num_sessions == 0)


async def test_many_streams_and_choices_move(gateway: RunningGateway, engines: list[FakeEngine]) -> None:
    streams = [Stream(gateway, prompt=[*PROMPT, number]) for number in range(6)]
    streams.append(Stream(gateway, n=3, temperature=1.0))
    await until(lambda: all(len(stream.text) > 10 for stream in streams))
    leaving, other = leaving_and_other(engines)
    await leaving.drain()
    assert [await stream.task for stream in streams] == [text_of(400)] * 7
    assert other.num_computed_tokens < 20 * (len(PROMPT) + 400)
    assert not gateway.gateway.pool.exchange.num_open


async def test_a_stream_stays_if_no_engine_can_fetch_its_blocks(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    stream = Stream(gateway)
    await until(lambda: len(stream.text) > 10)
    leaving, other = leaving_and_other(engines)
    await other.stop()
    await until(lambda: sum(one.usable for one in gateway.gateway.pool.engines) == 1)
    await leaving.drain()
    assert await stream.task == text_of(400)
    assert not other.requests


async def test_a_request_with_the_same_prompt_does_not_end_the_fetch_of_a_stream_that_moves(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    stream = Stream(gateway)
    await until(lambda: len(stream.text) > 200)
    leaving, other = leaving_and_other(engines)
    leaving.step_delay = other.step_delay = None
    other.fetch_wait = 30.0
    cache = leaving.prefix_cache
    assert cache is not None
    of_output = [block for block in cache.blocks if block not in cache.hashes(PROMPT, ())]
    cache.evict(of_output)
    await leaving.drain()
    await other.until(lambda engine: bool(engine.requests))
    second = Stream(gateway, max_tokens=4)
    await other.until(lambda engine: len(engine.requests) == 2)
    assert other.requests[1].kv_source.num_blocks == len(PROMPT) // 16
    await asyncio.sleep(0.1)
    for _ in range(4):
        await other.step()
    assert await second.task == text_of(4)
    assert not leaving.aborted
    cache.store(of_output)
    other.step_delay = 0.0
    assert await stream.task == text_of(400)
    assert len(leaving.aborted) == 1
    assert not gateway.gateway.pool.exchange.num_open


async def test_a_stream_does_not_move_to_an_engine_with_a_shorter_context(engines: list[FakeEngine]) -> None:
    leaving, _ = engines
    async with (
        running_gateway(leaving) as gateway,
        FakeEngine(movers=leaving.movers, script=say(TEXT, repeat=True), max_model_len=600) as other,
    ):
        stream = Stream(gateway)
        await until(lambda: len(stream.text) > 10)
        pool = gateway.gateway.pool
        pool.set_engines({engine.address: engine.address for engine in (leaving, other)})
        await until(lambda: sum(one.usable for one in pool.engines) == 2)
        await leaving.drain()
        assert await stream.task == text_of(400)
        assert not other.requests


async def test_a_stream_does_not_move_to_an_engine_that_is_silent(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    stream = Stream(gateway, max_tokens=1500)
    await until(lambda: len(stream.text) > 10)
    leaving, other = leaving_and_other(engines)
    other.silent = True
    (client,) = [one for one in gateway.gateway.pool.engines if one.address == other.address]
    await until(lambda: client.suspect)
    assert client.usable
    await leaving.drain()
    assert await stream.task == text_of(1500)
    assert not other.requests


async def test_a_request_without_a_token_moves_too(gateway: RunningGateway, engines: list[FakeEngine]) -> None:
    for engine in engines:
        engine.step_delay = None
    stream = Stream(gateway)
    await until(lambda: any(one.requests for one in engines))
    leaving, other = leaving_and_other(engines)
    await leaving.drain()
    await other.until(lambda engine: bool(engine.requests))
    await leaving.step()  # computes the prompt
    other.step_delay = 0.0
    assert await stream.task == text_of(400)
    assert other.num_computed_tokens <= 32


async def test_a_stream_whose_new_engine_rejects_it_fails_over(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    stream = Stream(gateway)
    await until(lambda: len(stream.text) > 10)
    leaving, other = leaving_and_other(engines)
    other.rejection = service_pb2.Rejected(code=8, message="full", retryable=True)
    await leaving.drain()
    await other.until(lambda engine: len(engine.requests) >= 2)
    await leaving.until(lambda engine: bool(engine.aborted))
    other.rejection = None
    assert await stream.task == text_of(400)
    page = await moved(gateway)
    assert page.value("proa_gateway_failovers_total", outcome="resumed") >= 1


async def test_a_stream_whose_new_engine_is_lost_fails_over(engines: list[FakeEngine]) -> None:
    movers = engines[0].movers
    async with (
        FakeEngine(movers=movers, script=say(TEXT, repeat=True), step_delay=0.002) as third,
        running_gateway(*engines, third) as gateway,
    ):
        stream = Stream(gateway)
        await until(lambda: len(stream.text) > 10)
        leaving, *others = sorted([*engines, third], key=lambda one: -len(one.requests))
        for engine in others:
            engine.step_delay = None
        await leaving.drain()
        await until(lambda: any(one.requests for one in others))
        lost, last = sorted(others, key=lambda one: -len(one.requests))
        await lost.stop()
        await leaving.until(lambda engine: bool(engine.aborted))
        last.step_delay = 0.0
        assert await stream.task == text_of(400)


async def test_a_draining_engine_that_dies_costs_the_stream_no_token(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    stream, leaving, other = await begin_move(gateway, engines, 10)
    await leaving.stop()
    other.step_delay = 0.0
    assert await stream.task == text_of(400)


async def test_a_client_that_goes_while_its_stream_moves_aborts_both_requests(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    stream, leaving, other = await begin_move(gateway, engines, 10)
    stream.task.cancel()
    await leaving.until(lambda engine: bool(engine.aborted))
    await other.until(lambda engine: bool(engine.aborted))
    assert not gateway.gateway.pool.exchange.num_open


async def test_stop_strings_hold_across_a_move(gateway: RunningGateway, engines: list[FakeEngine]) -> None:
    stop = "fifteen one two three"
    stream = Stream(gateway, stop=[stop])
    await until(lambda: len(stream.text) > 40)
    leaving, other = leaving_and_other(engines)
    await leaving.drain()
    assert await stream.task == (TEXT * 2)[: (TEXT * 2).index(stop)]
    await other.until(lambda engine: engine.num_unfinished == 0)


async def test_scores_of_a_prompt_stay_at_their_engine(gateway: RunningGateway, engines: list[FakeEngine]) -> None:
    for engine in engines:
        engine.step_delay = None
    task = asyncio.create_task(
        gateway.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 1})
    )
    await until(lambda: any(one.requests for one in engines))
    leaving, other = leaving_and_other(engines)
    await leaving.drain()
    leaving.step_delay = 0.0
    assert (await task).status_code == 200
    assert not other.requests
