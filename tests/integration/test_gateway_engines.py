"""Several engines behind one gateway: which one gets a request, and what happens when engines come and go."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from proa.engine.v1 import service_pb2
from proa_gateway.engines import client
from proa_gateway.engines.client import ConnectAttempt
from proa_gateway.engines.convert import wait_until_loaded
from proa_gateway.engines.discovery import CHANNEL_OPTIONS, insecure_channels
from support.fake_engine import FakeEngine, say
from support.gateway import PATIENT, RunningGateway, chat_body, listening_socket, running_gateway, until
from support.processes import fake_engine_process

CHAT = "/v1/chat/completions"
ENDLESS = say("one two three ", repeat=True)
HASTY = replace(PATIENT, heartbeat=2.0)


@pytest.fixture
async def engines() -> AsyncIterator[list[FakeEngine]]:
    """Two engines that step only when a test makes them."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(FakeEngine(script=ENDLESS, step_delay=None)) for _ in range(2)]


@pytest.fixture
async def gateway(engines: list[FakeEngine]) -> AsyncIterator[RunningGateway]:
    async with running_gateway(*engines) as gateway:
        yield gateway


def usable(gateway: RunningGateway) -> int:
    return sum(engine.usable for engine in gateway.gateway.pool.engines)


async def unblock(engines: list[FakeEngine]) -> None:
    for engine in engines:
        engine.step_delay = 0.0


async def test_requests_go_to_the_least_loaded_engine(gateway: RunningGateway, engines: list[FakeEngine]) -> None:
    tasks = [asyncio.create_task(gateway.chat(max_tokens=2)) for _ in range(10)]
    await until(lambda: sum(engine.num_unfinished for engine in engines) == 10)
    assert [engine.num_unfinished for engine in engines] == [5, 5]
    await unblock(engines)
    assert [(await task).status_code for task in tasks] == [200] * 10


async def test_load_from_other_gateways_counts(gateway: RunningGateway, engines: list[FakeEngine]) -> None:
    async with running_gateway(engines[0]) as other:
        foreign = [asyncio.create_task(other.chat(max_tokens=2)) for _ in range(4)]
        await engines[0].until(lambda engine: engine.num_unfinished == 4)
        busy = {client.address: client for client in gateway.gateway.pool.engines}[engines[0].address]
        await until(lambda: busy.load == 4)  # by the next heartbeat
        own = [asyncio.create_task(gateway.chat(max_tokens=2)) for _ in range(3)]
        await engines[1].until(lambda engine: engine.num_unfinished == 3)
        await unblock(engines)
        await asyncio.gather(*foreign, *own)


async def test_an_engine_that_stops_gets_no_requests_until_it_is_back(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    await unblock(engines)
    leaving, staying = engines
    port = int(leaving.address.rsplit(":")[1])
    await leaving.stop()
    await until(lambda: usable(gateway) == 1)
    before = len(staying.requests)
    assert [(await gateway.chat(max_tokens=1)).status_code for _ in range(4)] == [200] * 4
    assert len(staying.requests) == before + 4
    await leaving.start(port)
    await until(lambda: usable(gateway) == 2)
    before = len(leaving.requests)
    await asyncio.gather(*(gateway.chat(max_tokens=30) for _ in range(8)))
    assert len(leaving.requests) > before


async def test_a_request_without_tokens_is_sent_to_another_engine_when_its_own_is_lost(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    task = asyncio.create_task(gateway.chat(max_tokens=2))
    await until(lambda: any(engine.num_unfinished for engine in engines))
    holder, other = sorted(engines, key=lambda engine: -engine.num_unfinished)
    other.step_delay = 0.0
    await holder.stop()
    assert (await task).status_code == 200
    assert len(other.requests) == 1


async def test_a_rejected_request_is_sent_to_another_engine(gateway: RunningGateway, engines: list[FakeEngine]) -> None:
    await unblock(engines)
    engines[0].rejection = service_pb2.Rejected(code=8, message="full", retryable=True)
    answers = await asyncio.gather(*(gateway.chat(max_tokens=2) for _ in range(6)))
    assert [answer.status_code for answer in answers] == [200] * 6
    assert len(engines[1].requests) == 6
    assert engines[0].requests, "no request was sent to the engine that rejects"
    engines[1].rejection = engines[0].rejection
    assert (await gateway.chat()).status_code == 429


async def test_a_rejection_that_is_not_retryable_is_not_retried(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    for engine in engines:
        engine.rejection = service_pb2.Rejected(code=3, message="invalid", retryable=False)
    assert (await gateway.chat()).status_code == 400
    assert sum(len(engine.requests) for engine in engines) == 1


async def test_a_draining_engine_finishes_its_requests_and_gets_no_new_ones(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    stream = asyncio.create_task(gateway.events(CHAT, chat_body(max_tokens=20)))
    await until(lambda: any(engine.num_unfinished for engine in engines))
    leaving, staying = sorted(engines, key=lambda engine: -engine.num_unfinished)
    await leaving.drain()
    await until(lambda: usable(gateway) == 1)
    staying.step_delay = 0.0
    assert [(await gateway.chat(max_tokens=1)).status_code for _ in range(4)] == [200] * 4
    assert len(leaving.requests) == 1
    leaving.step_delay = 0.0
    events = await stream
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    await leaving.until(lambda engine: engine.num_sessions == 0)


async def test_killing_the_only_engine_ends_its_stream_with_an_engine_lost_error() -> None:
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


async def test_a_missed_heartbeat_ends_the_session(engines: list[FakeEngine]) -> None:
    async with running_gateway(engines[0], deadlines=HASTY) as gateway:
        engines[0].step_delay = 0.01
        stream = asyncio.create_task(gateway.events(CHAT, chat_body(max_tokens=4000)))
        await engines[0].until(lambda engine: engine.step_count > 3)
        engines[0].silent = True
        events = await asyncio.wait_for(stream, 20)
        assert events[-2]["error"]["code"] == "engine_lost"
        assert usable(gateway) == 0


async def test_an_engine_with_heartbeats_keeps_its_request_through_a_long_step(engines: list[FakeEngine]) -> None:
    engines[0].stuck = True
    async with running_gateway(engines[0], deadlines=HASTY) as gateway:
        task = asyncio.create_task(gateway.chat(max_tokens=2))
        await asyncio.sleep(HASTY.heartbeat * 1.5)
        engines[0].stuck = False
        await unblock(engines)
        assert (await task).status_code == 200


async def test_a_replica_with_another_tokenizer_is_refused_while_others_are_connected() -> None:
    async with FakeEngine(script=ENDLESS) as engine:
        files = {**engine.files, "generation_config.json": b'{"temperature": 0.5}'}
        async with FakeEngine(script=ENDLESS, files=files) as other, running_gateway(engine) as gateway:
            gateway.gateway.pool.set_engines({each.address: each.address for each in (engine, other)})
            await other.until(lambda engine: engine.num_sessions == 1)
            await other.until(lambda engine: engine.num_sessions == 0)
            await unblock([engine, other])
            for _ in range(4):
                assert (await gateway.chat(max_tokens=1)).status_code == 200
            assert not other.requests
            assert usable(gateway) == 1
            # It is accepted once no other replica is left.
            await engine.stop()
            await until(
                lambda: [each.address for each in gateway.gateway.pool.engines if each.usable] == [other.address]
            )
            assert (await gateway.chat(max_tokens=1)).status_code == 200
            assert other.requests[0].sampling_params.temperature == 0.5
            card = (await gateway.http.get("/v1/models")).json()["data"][0]
            assert card["default_sampling_params"]["temperature"] == 0.5


@pytest.mark.parametrize("fault", ["digest", "block hashes", "no tokenizer"])
async def test_an_incompatible_engine_is_refused(fault: str) -> None:
    async with FakeEngine() as engine:
        if fault == "digest":
            engine.info.tokenizer_digest = "0" * 64
        elif fault == "block hashes":
            engine.info.block_hash_version += 1
        else:
            engine.info.tokenizer_digest = ""
        async with running_gateway(engine, ready=False) as gateway:
            await engine.until(lambda engine: engine.num_sessions == 1)
            await engine.until(lambda engine: engine.num_sessions == 0)
            assert usable(gateway) == 0
            assert (await gateway.chat()).status_code == 503


async def test_requests_go_to_the_engine_that_serves_their_model() -> None:
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


async def test_all_names_of_a_model_answer_and_the_first_is_that_of_responses_and_metrics() -> None:
    async with FakeEngine(script=say("apples"), model_name="apple") as apple, FakeEngine(model_name="pear") as pear:
        apple.info.aliases.extend(["org/apple", "fruit"])
        pear.info.aliases.extend(["apple"])  # the name of another model stays its own
        async with running_gateway(apple, pear) as gateway:
            for name in ("apple", "org/apple", "fruit"):
                answer = (await gateway.chat(model=name)).json()
                assert (answer["model"], answer["choices"][0]["message"]["content"]) == ("apple", "apples")
                card = (await gateway.http.get(f"/v1/models/{name}")).json()
                assert (card["id"], card["root"], card["parent"], card["max_model_len"]) == (name, "apple", None, 4096)
            ids = [model["id"] for model in (await gateway.http.get("/v1/models")).json()["data"]]
            assert ids == ["apple", "pear", "org/apple", "fruit"]
            tokens = (await gateway.http.post("/tokenize", json={"model": "fruit", "prompt": "a"})).json()
            assert tokens["count"] > 0
            metrics = (await gateway.http.get("/metrics")).text
        assert 'model_name="apple"' in metrics
        assert "fruit" not in metrics
        assert len(apple.requests) == 3


async def test_an_engine_that_is_no_longer_listed_finishes_its_requests_and_is_removed(
    engines: list[FakeEngine],
) -> None:
    leaving, staying = engines
    async with running_gateway(leaving) as gateway:
        stream = asyncio.create_task(gateway.events(CHAT, chat_body(max_tokens=5)))
        await leaving.until(lambda engine: engine.num_unfinished == 1)
        gateway.gateway.pool.set_engines({staying.address: "staying"})
        await until(lambda: usable(gateway) == 1)
        await unblock(engines)
        assert (await gateway.chat(max_tokens=1)).status_code == 200
        assert (await stream)[-1] == "[DONE]"
        assert len(staying.requests) == 1
        await leaving.stop()
        await until(lambda: len(gateway.gateway.pool.engines) == 1)


async def test_a_host_that_does_not_answer_does_not_delay_requests() -> None:
    with listening_socket() as listener:
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        deadlines = replace(PATIENT, connect=0.3)
        async with running_gateway(address, ready=False, deadlines=deadlines) as gateway:
            started = time.monotonic()
            assert (await gateway.chat()).status_code == 503
            assert time.monotonic() - started < 2


async def test_a_start_and_a_shutdown_as_they_should_be_log_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="proa_gateway.engines.client")
    engine = FakeEngine(script=say("one"))
    engine.loading = True
    async with engine, running_gateway(engine, ready=False) as gateway:
        await until(lambda: "shutting down" in caplog.text)  # what the engine answers while it loads
        await engine.finish_loading()
        await until(lambda: usable(gateway) == 1)
        await engine.drain()
        await until(lambda: "engine gone" in caplog.text)
    records = [each for each in caplog.records if each.name == "proa_gateway.engines.client"]
    assert records[0].message.startswith("engine not ready yet")
    assert {each.levelname for each in records} == {"INFO"}


async def test_an_engine_is_connected_as_soon_as_it_has_loaded_its_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("FIRST_RECONNECT_DELAY", "LAST_RECONNECT_DELAY"):
        monkeypatch.setattr(client, name, 3600.0)
    engine = FakeEngine(script=say("one"))
    engine.loading = True
    async with engine, running_gateway(engine, ready=False) as gateway:
        await until(lambda: engine.health.num_watches)
        await engine.finish_loading()
        await until(lambda: usable(gateway) == 1)


async def test_an_engine_that_loads_no_model_is_not_waited_for() -> None:
    async with FakeEngine() as engine, insecure_channels(engine.address, CHANNEL_OPTIONS) as channel:
        assert not await wait_until_loaded(channel)


async def test_an_engine_that_ends_the_watch_without_a_status_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def end(*_: object) -> None:
        pass

    engine = FakeEngine()
    monkeypatch.setattr(engine.health, "Watch", end)
    async with engine, insecure_channels(engine.address, CHANNEL_OPTIONS) as channel:
        assert not await wait_until_loaded(channel)


@pytest.mark.parametrize(
    ("attempt", "seconds"),
    [
        (ConnectAttempt("", connected=True), 0.1),
        (ConnectAttempt("no answer"), 1.0),
        (ConnectAttempt("no tokenizer", is_refused=True), 1.0),  # each attempt opens a session
        (ConnectAttempt("a bug", failure=KeyError("x")), 1.0),
    ],
)
def test_the_time_to_the_next_attempt_depends_on_how_the_last_one_ended(
    attempt: ConnectAttempt, seconds: float
) -> None:
    assert attempt.delay(0.5) == seconds
