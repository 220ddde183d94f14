"""Several engines behind one gateway: who gets a request, and what becomes of it when engines come and go."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from proa.engine.v1 import service_pb2
from support.fake_engine import FakeEngine, say
from support.gateway import PATIENT, RunningGateway, chat_body, listening_socket, running_gateway, until
from support.processes import fake_engine_process

CHAT = "/v1/chat/completions"
ENDLESS = say("one two three ", repeat=True)
HASTY = replace(PATIENT, heartbeat=2.0)


@pytest.fixture
async def engines() -> AsyncIterator[list[FakeEngine]]:
    """Two engines that step only when told to."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(FakeEngine(script=ENDLESS, step_delay=None)) for _ in range(2)]


@pytest.fixture
async def gateway(engines: list[FakeEngine]) -> AsyncIterator[RunningGateway]:
    async with running_gateway(*engines) as gateway:
        yield gateway


def usable(gateway: RunningGateway) -> int:
    return sum(engine.usable for engine in gateway.gateway.pool.engines)


async def go(engines: list[FakeEngine]) -> None:
    for engine in engines:
        engine.step_delay = 0.0


async def test_requests_go_to_the_least_loaded_engine(gateway: RunningGateway, engines: list[FakeEngine]) -> None:
    tasks = [asyncio.create_task(gateway.chat(max_tokens=2)) for _ in range(10)]
    await until(lambda: sum(engine.num_unfinished for engine in engines) == 10)
    assert [engine.num_unfinished for engine in engines] == [5, 5]
    await go(engines)
    assert [(await task).status_code for task in tasks] == [200] * 10


async def test_load_that_others_put_on_an_engine_counts(gateway: RunningGateway, engines: list[FakeEngine]) -> None:
    async with running_gateway(engines[0]) as other:
        foreign = [asyncio.create_task(other.chat(max_tokens=2)) for _ in range(4)]
        await engines[0].until(lambda engine: engine.num_unfinished == 4)
        busy = {client.address: client for client in gateway.gateway.pool.engines}[engines[0].address]
        await until(lambda: busy.load == 4)  # by the next heartbeat
        own = [asyncio.create_task(gateway.chat(max_tokens=2)) for _ in range(3)]
        await engines[1].until(lambda engine: engine.num_unfinished == 3)
        await go(engines)
        await asyncio.gather(*foreign, *own)


async def test_an_engine_that_goes_away_is_taken_out_and_comes_back(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    await go(engines)
    leaver, stayer = engines
    port = int(leaver.address.rsplit(":")[1])
    await leaver.stop()
    await until(lambda: usable(gateway) == 1)
    before = len(stayer.requests)
    assert [(await gateway.chat(max_tokens=1)).status_code for _ in range(4)] == [200] * 4
    assert len(stayer.requests) == before + 4
    await leaver.start(port)
    await until(lambda: usable(gateway) == 2)
    before = len(leaver.requests)
    await asyncio.gather(*(gateway.chat(max_tokens=30) for _ in range(8)))
    assert len(leaver.requests) > before


async def test_a_request_without_a_token_moves_to_another_engine_when_its_own_is_lost(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    task = asyncio.create_task(gateway.chat(max_tokens=2))
    await until(lambda: any(engine.num_unfinished for engine in engines))
    holder, other = sorted(engines, key=lambda engine: -engine.num_unfinished)
    other.step_delay = 0.0
    await holder.stop()
    assert (await task).status_code == 200
    assert len(other.requests) == 1


async def test_a_rejected_request_is_taken_by_another_engine(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    await go(engines)
    engines[0].rejection = service_pb2.Rejected(code=8, message="full", retryable=True)
    answers = await asyncio.gather(*(gateway.chat(max_tokens=2) for _ in range(6)))
    assert [answer.status_code for answer in answers] == [200] * 6
    assert len(engines[1].requests) == 6
    assert engines[0].requests, "no request was sent to the engine that rejects"
    engines[1].rejection = engines[0].rejection
    assert (await gateway.chat()).status_code == 429


async def test_a_rejection_that_no_engine_would_take_is_not_tried_again(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    for engine in engines:
        engine.rejection = service_pb2.Rejected(code=3, message="nobody would", retryable=False)
    assert (await gateway.chat()).status_code == 400
    assert sum(len(engine.requests) for engine in engines) == 1


async def test_a_draining_engine_finishes_what_it_has_and_gets_nothing_new(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    stream = asyncio.create_task(gateway.events(CHAT, chat_body(max_tokens=20)))
    await until(lambda: any(engine.num_unfinished for engine in engines))
    leaver, stayer = sorted(engines, key=lambda engine: -engine.num_unfinished)
    await leaver.drain()
    await until(lambda: usable(gateway) == 1)
    stayer.step_delay = 0.0
    assert [(await gateway.chat(max_tokens=1)).status_code for _ in range(4)] == [200] * 4
    assert len(leaver.requests) == 1
    leaver.step_delay = 0.0
    events = await stream
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    await leaver.until(lambda engine: engine.num_sessions == 0)


async def test_an_engine_killed_in_mid_stream_ends_the_stream_with_a_typed_error() -> None:
    with fake_engine_process("--repeat", "--step-delay", "0.02") as (process, address):
        async with running_gateway(address) as gateway:
            stream = asyncio.create_task(gateway.events(CHAT, chat_body(max_tokens=100_000)))
            in_flight = gateway.gateway.pool.engines
            await until(lambda: next(iter(in_flight)).load_stats.num_running_reqs == 1)
            process.kill()
            killed = time.monotonic()
            events = await stream
            assert time.monotonic() - killed < 2
            assert events[-1] == "[DONE]"
            assert events[-2]["error"]["code"] == "engine_lost"
            assert events[-2]["error"]["type"] == "server_error"
            assert events[-3]["choices"][0]["delta"]["content"]
            assert (await gateway.chat()).status_code == 503


async def test_a_silent_engine_is_a_dead_one(engines: list[FakeEngine]) -> None:
    async with running_gateway(engines[0], deadlines=HASTY) as gateway:
        engines[0].step_delay = 0.01
        stream = asyncio.create_task(gateway.events(CHAT, chat_body(max_tokens=4000)))
        await engines[0].until(lambda engine: engine.step_count > 3)
        engines[0].silent = True
        events = await asyncio.wait_for(stream, 20)
        assert events[-2]["error"]["code"] == "engine_lost"
        assert usable(gateway) == 0


async def test_an_engine_that_speaks_keeps_its_request_through_a_long_step(engines: list[FakeEngine]) -> None:
    engines[0].stuck = True
    async with running_gateway(engines[0], deadlines=HASTY) as gateway:
        task = asyncio.create_task(gateway.chat(max_tokens=2))
        await asyncio.sleep(HASTY.heartbeat * 1.5)
        engines[0].stuck = False
        await go(engines)
        assert (await task).status_code == 200


async def test_a_replica_with_another_tokenizer_is_refused() -> None:
    async with FakeEngine(script=ENDLESS) as engine:
        files = {**engine.files, "generation_config.json": b'{"temperature": 0.5}'}
        async with FakeEngine(script=ENDLESS, files=files) as stranger, running_gateway(engine) as gateway:
            gateway.gateway.pool.set_engines({each.address: each.address for each in (engine, stranger)})
            await stranger.until(lambda engine: engine.num_sessions == 1)
            await stranger.until(lambda engine: engine.num_sessions == 0)
            await go([engine, stranger])
            for _ in range(4):
                assert (await gateway.chat(max_tokens=1)).status_code == 200
            assert not stranger.requests
            assert usable(gateway) == 1
            # It is the one to go by once no other is left.
            await engine.stop()
            await until(
                lambda: [each.address for each in gateway.gateway.pool.engines if each.usable] == [stranger.address]
            )
            assert (await gateway.chat(max_tokens=1)).status_code == 200
            assert stranger.requests[0].sampling_params.temperature == 0.5


@pytest.mark.parametrize("lie", ["digest", "block hashes", "no tokenizer"])
async def test_an_engine_that_cannot_be_used_is_refused(lie: str) -> None:
    async with FakeEngine() as engine:
        if lie == "digest":
            engine.info.tokenizer_digest = "0" * 64
        elif lie == "block hashes":
            engine.info.block_hash_version += 1
        else:
            engine.info.tokenizer_digest = ""
        async with running_gateway(engine, ready=False) as gateway:
            await engine.until(lambda engine: engine.num_sessions == 1)
            await engine.until(lambda engine: engine.num_sessions == 0)
            assert usable(gateway) == 0
            assert (await gateway.chat()).status_code == 503


async def test_engines_of_several_models_are_told_apart_by_name() -> None:
    async with (
        FakeEngine(script=say("apples"), model_name="org/apple") as apple,
        FakeEngine(script=say("pears"), model_name="pear") as pear,
        running_gateway(apple, pear) as gateway,
    ):
        for model, text in (("org/apple", "apples"), ("pear", "pears")):
            answer = (await gateway.chat(model=model)).json()
            assert (answer["model"], answer["choices"][0]["message"]["content"]) == (model, text)
        ids = [model["id"] for model in (await gateway.http.get("/v1/models")).json()["data"]]
        assert ids == ["org/apple", "pear"]
        assert (await gateway.http.get("/v1/models/org/apple")).json()["id"] == "org/apple"
        assert (await gateway.http.post(CHAT, json={"messages": [{"role": "user", "content": "x"}]})).status_code == 400


async def test_an_engine_that_is_no_longer_listed_finishes_and_is_let_go(engines: list[FakeEngine]) -> None:
    leaver, stayer = engines
    async with running_gateway(leaver) as gateway:
        stream = asyncio.create_task(gateway.events(CHAT, chat_body(max_tokens=5)))
        await leaver.until(lambda engine: engine.num_unfinished == 1)
        gateway.gateway.pool.set_engines({stayer.address: "stayer"})
        await until(lambda: usable(gateway) == 1)
        await go(engines)
        assert (await gateway.chat(max_tokens=1)).status_code == 200
        assert (await stream)[-1] == "[DONE]"
        assert len(stayer.requests) == 1
        await leaver.stop()
        await until(lambda: len(gateway.gateway.pool.engines) == 1)


async def test_the_connect_deadline_bounds_a_host_that_says_nothing() -> None:
    with listening_socket() as listener:
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        deadlines = replace(PATIENT, connect=0.3)
        async with running_gateway(address, ready=False, deadlines=deadlines) as gateway:
            started = time.monotonic()
            assert (await gateway.chat()).status_code == 503
            assert time.monotonic() - started < 2
