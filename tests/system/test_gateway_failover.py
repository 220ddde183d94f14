"""Failover in the gateway: which engine continues a request, how long it waits, which errors clients get."""

import asyncio
import logging
import random
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from proa.engine.v1 import service_pb2
from proa_gateway.engines.client import THRESHOLD
from support.cable import Cable
from support.fake_engine import FakeEngine, say
from support.gateway import PATIENT, RunningGateway, chat_body, events_of, running_gateway, until
from support.otlp import OtlpReceiver
from support.processes import fake_engine_process, free_port
from support.scrape import Scrape
from support.tokenizers import byte_level_tokenizer

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TEXT = "one two three €4 👩‍👩‍👧 "
ENDLESS = say(TEXT, repeat=True)
FULL = service_pb2.Rejected(code=8, message="full", retryable=True)
UNAVAILABLE = service_pb2.Rejected(code=14, message="unavailable", retryable=True)
# Seconds from a power failure to the end of the session: 3 as documented, and 2 for a busy machine. Without pings it
# would take the heartbeat of 10 s.
DETECTION_TIME = 5.0


@pytest.fixture
async def engines() -> AsyncIterator[list[FakeEngine]]:
    """Two engines that step only when a test makes them."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(FakeEngine(script=ENDLESS, step_delay=None)) for _ in range(2)]


@pytest.fixture
async def gateway(engines: list[FakeEngine]) -> AsyncIterator[RunningGateway]:
    async with running_gateway(*engines) as gateway:
        yield gateway


def num_received(gateway: RunningGateway) -> int:
    """Tokens of unfinished requests that the gateway has read."""
    sessions = [client._session for client in gateway.gateway.pool.engines if client._session is not None]
    sinks: list[Any] = [sink for session in sessions for sink in session._sinks.values()]
    return sum(len(sink.received) for sink in sinks)


def page(gateway: RunningGateway) -> Scrape:
    return Scrape(gateway.gateway.metrics.render().decode())


async def begin(
    gateway: RunningGateway, engines: list[FakeEngine], num_tokens: int, path: str = CHAT, **fields: Any
) -> tuple["asyncio.Task[list[Any]]", FakeEngine, FakeEngine]:
    """Start a stream and run it for `num_tokens`. Return it, the engine that runs it, and the other one."""
    body = chat_body(**fields) if path == CHAT else {"model": "fake", "prompt": "Hi", **fields}
    stream = asyncio.create_task(gateway.events(path, body))
    await until(lambda: any(engine.num_unfinished for engine in engines))
    holder, other = sorted(engines, key=lambda engine: -engine.num_unfinished)
    for _ in range(num_tokens):
        await holder.step()
    await until(lambda: num_received(gateway) == num_tokens)
    return stream, holder, other


def text_of(events: list[Any]) -> str:
    choices = [choice for event in events[:-1] for choice in event.get("choices", ())]
    return "".join(
        (choice["delta"].get("content") or "") if "delta" in choice else choice["text"] for choice in choices
    )


def error_of(events: list[Any]) -> str:
    assert events[-1] == "[DONE]"
    return str(events[-2]["error"]["code"])


@pytest.mark.parametrize("cut", [1, 9, 18, 19, 20, 26])
async def test_another_engine_continues_after_the_last_token_received(
    gateway: RunningGateway, engines: list[FakeEngine], cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="proa_gateway.engines")
    stream, holder, other = await begin(gateway, engines, cut, COMPLETIONS, max_tokens=60, logprobs=1)
    other.step_delay = 0.0
    await holder.stop()
    events = await stream
    assert text_of(events) == (TEXT * 60)[: len(text_of(events))]
    tokens = [token for event in events[:-1] for token in event["choices"][0]["logprobs"]["tokens"]]
    assert len(tokens) == 60
    (first,), (second,) = holder.requests, other.requests
    assert len(array("I", second.resumed_token_ids)) == cut
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.sampling_params == second.sampling_params
    assert first.request_id != second.request_id
    assert page(gateway).value("proa_gateway_failovers_total", outcome="resumed") == 1
    gateway.gateway.pool.failovers.flush()
    assert f"resumed 1 stream of {holder.address} on {other.address}" in caplog.messages
    assert [each for each in caplog.messages if each.startswith(f"engine lost: {holder.address}: ")]


async def test_each_attempt_has_a_span_and_the_request_span_has_a_failover_event(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    with OtlpReceiver() as receiver:
        for name, value in receiver.environment.items():
            monkeypatch.setenv(name, value)
        async with running_gateway(*engines) as gateway:
            stream, holder, other = await begin(gateway, engines, 5, max_tokens=20)
            other.step_delay = 0.0
            await holder.stop()
            await stream
        (root,) = [span for span in receiver.spans if span.kind == "SERVER"]
        attempts = sorted((span for span in receiver.spans if span.name == "Generate"), key=lambda span: span.start)
    assert "failover" in root.events
    assert [(span.parent_id, span.failed, span.attributes["proa.attempt"]) for span in attempts] == [
        (root.span_id, True, 1),
        (root.span_id, False, 2),
    ]
    assert other.requests[0].trace_headers["traceparent"].split("-")[2] == attempts[1].span_id


async def test_an_answer_without_streaming_and_its_usage_survive_the_loss_of_an_engine(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    fields = {"model": "fake", "prompt": "Hi", "max_tokens": 30, "prompt_logprobs": 1, "logprobs": 1}
    task = asyncio.create_task(gateway.http.post(COMPLETIONS, json=fields))
    await until(lambda: any(engine.num_unfinished for engine in engines))
    holder, other = sorted(engines, key=lambda engine: -engine.num_unfinished)
    for _ in range(10):
        await holder.step()
    await until(lambda: num_received(gateway) == 10)
    other.step_delay = 0.0
    await holder.stop()
    answer = (await task).json()
    assert answer["usage"]["completion_tokens"] == 30
    assert len(answer["choices"][0]["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 30
    assert not other.requests[0].sampling_params.HasField("prompt_logprobs")


async def test_each_choice_fails_over_on_its_own_and_ended_ones_are_not_sent_again(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    stream, holder, other = await begin(gateway, engines, 0, n=4, max_tokens=20, stop=["three"])
    await until(lambda: holder.num_unfinished + other.num_unfinished == 4)
    for _ in range(14):  # past the stop string
        await holder.step()
    await holder.until(lambda engine: len(engine.aborted) == 2)
    await holder.stop()
    other.step_delay = 0.0
    events = await stream
    endings = [choice["finish_reason"] for event in events[:-1] for choice in event["choices"]]
    assert sorted(filter(None, endings)) == ["stop"] * 4
    assert len(other.requests) == 2
    assert not any(request.resumed_token_ids for request in other.requests)


async def test_a_stream_ends_at_once_if_its_only_engine_is_lost(engines: list[FakeEngine]) -> None:
    async with running_gateway(engines[0]) as gateway:
        stream, holder, _ = await begin(gateway, engines, 5, max_tokens=60)
        await holder.stop()
        assert error_of(await asyncio.wait_for(stream, 2)) == "engine_lost"
        assert page(gateway).value("proa_gateway_failovers_total", outcome="given_up") == 1


async def test_a_stream_waits_for_an_engine_that_was_just_listed(engines: list[FakeEngine]) -> None:
    port = free_port()
    async with running_gateway(engines[0]) as gateway:
        listed = {engines[0].address: engines[0].address, f"127.0.0.1:{port}": "late"}
        gateway.gateway.pool.set_engines(listed)
        stream, holder, _ = await begin(gateway, engines, 5, max_tokens=60)
        await holder.stop()
        await asyncio.sleep(0.3)
        assert not stream.done()
        late = FakeEngine(script=ENDLESS)
        await late.start(port)
        try:
            events = await stream
        finally:
            await late.stop()
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert len(array("I", late.requests[0].resumed_token_ids)) == 5


async def test_a_stream_waits_for_an_engine_that_is_loading(engines: list[FakeEngine]) -> None:
    engines[1].loading = True
    async with running_gateway(*engines, ready=False) as gateway:
        pool = gateway.gateway.pool
        await until(lambda: pool.ready and all(engine.grace_period("fake") for engine in pool.engines))
        stream, holder, late = await begin(gateway, engines, 5, max_tokens=60)
        await holder.stop()
        await asyncio.sleep(0.3)
        assert not stream.done()
        late.loading, late.step_delay = False, 0.0
        events = await stream
        assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_a_wait_for_another_engine_times_out(engines: list[FakeEngine]) -> None:
    engines[1].loading = True
    async with running_gateway(*engines, ready=False, deadlines=replace(PATIENT, failover=1.0)) as gateway:
        await until(lambda: gateway.gateway.pool.ready)
        stream, holder, _ = await begin(gateway, engines, 5, max_tokens=60)
        await holder.stop()
        assert error_of(await asyncio.wait_for(stream, 5)) == "engine_lost"


async def test_an_address_that_never_answered_is_not_waited_for(engines: list[FakeEngine]) -> None:
    async with running_gateway(engines[0], f"127.0.0.1:{free_port()}", ready=False) as gateway:
        await until(lambda: gateway.gateway.pool.ready)
        stream, holder, _ = await begin(gateway, engines, 5, max_tokens=60)
        await holder.stop()
        assert error_of(await asyncio.wait_for(stream, 2)) == "engine_lost"


async def test_requests_fail_over_as_soon_as_another_pod_has_the_address(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    stream, holder, other = await begin(gateway, engines, 5, max_tokens=60)
    holder.silent, other.step_delay = True, 0.0
    before = {client.address: client for client in gateway.gateway.pool.engines}
    gateway.gateway.pool.set_engines({holder.address: "another pod", other.address: other.address})
    events = await asyncio.wait_for(stream, 5)  # long before the heartbeat is missed
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert len(array("I", other.requests[0].resumed_token_ids)) == 5
    await until(lambda: all(client.usable for client in gateway.gateway.pool.engines))
    after = {client.address: client for client in gateway.gateway.pool.engines}
    assert {address: after[address] is client for address, client in before.items()} == {
        holder.address: False,
        other.address: True,
    }
    assert [engine.num_sessions for engine in engines] == [1, 1]
    assert not after[holder.address].load


async def test_an_engine_with_other_weights_does_not_continue_a_stream(engines: list[FakeEngine]) -> None:
    engines[0].info.revision = "one"
    async with running_gateway(*engines) as gateway:
        stream, holder, other = await begin(gateway, engines, 5, max_tokens=60)
        other.step_delay = 0.0
        await holder.stop()
        assert error_of(await asyncio.wait_for(stream, 5)) == "engine_lost"
        assert not other.requests
        assert (await gateway.chat(max_tokens=3)).status_code == 200


async def test_a_stream_is_sent_again_to_an_engine_that_was_full(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    stream, holder, other = await begin(gateway, engines, 5, max_tokens=60)
    other.rejection, other.step_delay = FULL, 0.0
    await holder.stop()
    await other.until(lambda engine: len(engine.requests) >= 4)
    other.rejection = None
    events = await stream
    assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_streams_fail_over_when_a_draining_engine_stops(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    stream, holder, other = await begin(gateway, engines, 5, max_tokens=60)
    other.step_delay = 0.0
    await holder.drain()
    await holder.step()
    assert not stream.done()
    await holder.stop()
    events = await stream
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert len(array("I", other.requests[0].resumed_token_ids)) in (5, 6)


async def test_a_request_that_crashes_engines_is_given_up_after_three() -> None:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine(step_delay=None)) for _ in range(5)]
        gateway = await stack.enter_async_context(running_gateway(*engines))
        task = asyncio.create_task(gateway.chat(max_tokens=2))
        alive = set(engines)
        for _ in range(3):
            await until(lambda: any(engine.num_unfinished for engine in alive))
            killed = next(engine for engine in alive if engine.num_unfinished)
            alive.remove(killed)
            await killed.stop()
        assert (await asyncio.wait_for(task, 10)).json()["error"]["code"] == "engine_lost"
        assert sum(len(engine.requests) for engine in engines) == 3


async def test_streams_of_a_dead_node_fail_over_after_unanswered_pings() -> None:
    arguments = ("--repeat", "--text", TEXT, "--step-delay", "0.02")
    with fake_engine_process(*arguments) as (_, far), fake_engine_process(*arguments) as (_, near):
        async with Cable(far) as cable, running_gateway(cable.address, near) as gateway:
            clients = [Client(gateway) for _ in range(4)]
            streams = [asyncio.create_task(client.read()) for client in clients]
            await until(lambda: min(len(client.events) for client in clients) > 10)
            cable.cut()
            await asyncio.gather(*streams)
            cable.mend()
            texts = [text_of(client.events) for client in clients]
            assert texts == [(TEXT * 200)[: len(texts[0])]] * 4
            assert page(gateway).value("proa_gateway_failovers_total", outcome="resumed") == 2
            silences = sorted(client.longest_silence for client in clients)
            assert silences[2] > 1  # there was no FIN or RST
            assert silences[3] < DETECTION_TIME


@pytest.mark.parametrize("generating", [True, False], ids=["generating", "idle"])
async def test_the_session_of_a_dead_node_ends_after_unanswered_pings(generating: bool) -> None:
    with fake_engine_process("--repeat", "--step-delay", "0.02") as (_, far):
        async with Cable(far) as cable, running_gateway(cable.address) as gateway:
            (engine,) = gateway.gateway.pool.engines
            streams = [asyncio.create_task(gateway.events(CHAT, chat_body(max_tokens=4000)))] if generating else []
            await until(lambda: engine.load_stats.num_running_reqs == len(streams))
            await asyncio.sleep(1)  # longer than the time between two pings
            cable.cut()
            cut = time.monotonic()
            await until(lambda: engine.model_name is None)
            assert 1 < time.monotonic() - cut < DETECTION_TIME
            assert [error_of(await stream) for stream in streams] == ["engine_lost"] * len(streams)
            cable.mend()


class Client:
    """Reads a stream of 200 tokens and measures the longest time between two events."""

    def __init__(self, gateway: RunningGateway) -> None:
        self._gateway = gateway
        self.events: list[Any] = []
        self.longest_silence = 0.0

    async def read(self) -> None:
        last = None
        async with self._gateway.http.stream("POST", CHAT, json=chat_body(max_tokens=200, stream=True)) as response:
            async for event in events_of(response):
                now = time.monotonic()
                self.longest_silence = max(self.longest_silence, now - (last or now))
                last = now
                self.events.append(event)


async def chat_until(gateway: RunningGateway, condition: Callable[[], bool]) -> None:
    """Send requests one by one, which must succeed, until the condition holds. A rejected request counts as load of its
    engine until the next statistics."""
    async with asyncio.timeout(20):
        while not condition():
            assert (await gateway.chat(max_tokens=2)).status_code == 200


async def test_an_engine_that_fails_its_requests_gets_none_until_its_breaker_is_half_open(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    failing, healthy = engines
    failing.rejection, healthy.step_delay, failing.step_delay = UNAVAILABLE, 0.0, 0.0
    await chat_until(gateway, lambda: len(failing.requests) == THRESHOLD)
    assert [engine.address for engine in gateway.gateway.pool.engines if engine.usable] == [healthy.address]
    await until(lambda: page(gateway).value("proa_gateway_engine_breaker_state", engine=failing.address) == 2)
    failing.rejection = None
    await until(lambda: all(engine.usable for engine in gateway.gateway.pool.engines))  # half-open
    before = len(failing.requests)
    await chat_until(gateway, lambda: len(failing.requests) > before)
    await until(lambda: page(gateway).value("proa_gateway_engine_breaker_state", engine=failing.address) == 0)


async def test_invalid_requests_and_full_queues_do_not_open_the_breaker(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    for rejection in (service_pb2.Rejected(code=3, message="nonsense"), FULL):
        for engine in engines:
            engine.rejection = rejection
        for _ in range(2 * THRESHOLD):
            assert (await gateway.chat(max_tokens=2)).status_code in (400, 429)
    assert all(engine.usable for engine in gateway.gateway.pool.engines)


async def test_a_silent_engine_gets_no_new_requests_if_there_is_another(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    silent, other = engines
    silent.silent, other.step_delay = True, 0.0
    clients = {client.address: client for client in gateway.gateway.pool.engines}
    await until(lambda: clients[silent.address].suspect)
    assert [(await gateway.chat(max_tokens=1)).status_code for _ in range(6)] == [200] * 6
    assert not silent.requests
    assert clients[silent.address].usable  # it would get them if it were the only one


async def test_the_timeout_header_ends_a_request(gateway: RunningGateway, engines: list[FakeEngine]) -> None:
    headers = {"x-request-timeout": "1"}
    answer = await gateway.http.post(CHAT, json=chat_body(max_tokens=5), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    await until(lambda: any(engine.aborted for engine in engines))
    answer = await gateway.http.post(CHAT, json=chat_body(), headers={"x-request-timeout": "soon"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-timeout")


async def test_the_request_deadline_ends_a_stream_with_an_error_event(engines: list[FakeEngine]) -> None:
    engines[0].step_delay = 0.02
    async with running_gateway(engines[0], deadlines=replace(PATIENT, request=1.0)) as gateway:
        events = await asyncio.wait_for(gateway.events(CHAT, chat_body(max_tokens=3000)), 10)
        assert error_of(events) == "deadline_exceeded"
        assert text_of(events).startswith(TEXT[:5])


@pytest.mark.parametrize("seed", range(2))
async def test_no_token_is_lost_or_duplicated_under_random_engine_failures(seed: int) -> None:
    rng = random.Random(seed)
    async with AsyncExitStack() as stack:
        engines = [FakeEngine(script=ENDLESS, step_delay=None) for _ in range(3)]
        for engine in engines:
            await stack.enter_async_context(engine)
        gateway = await stack.enter_async_context(running_gateway(*engines))
        lengths = [rng.randint(50, 300) for _ in range(40)]
        streams = [asyncio.create_task(gateway.events(CHAT, chat_body(max_tokens=length))) for length in lengths]
        await until(lambda: sum(engine.num_unfinished for engine in engines) == len(lengths))
        for engine in engines:
            await engine.step()
        await until(lambda: num_received(gateway) == len(lengths))  # before its first token a rejection can be final
        for engine in engines:
            engine.step_delay = 0.005
            engine._notify()
        disturbing = asyncio.create_task(disturb(engines, rng, streams))
        answers = await asyncio.gather(*streams)
        assert page(gateway).value("proa_gateway_failovers_total", outcome="resumed") > 10
        await disturbing
    ids = byte_level_tokenizer().encode(TEXT).ids
    for length, events in zip(lengths, answers, strict=True):
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        whole = byte_level_tokenizer().decode((ids * length)[:length])
        assert text_of(events) == whole


async def disturb(engines: list[FakeEngine], rng: random.Random, streams: "list[asyncio.Task[list[Any]]]") -> None:
    """While streams run: stop and restart a random engine, let it reject requests for a while, or drain it."""
    while not all(stream.done() for stream in streams):
        engine = rng.choice(engines)
        await asyncio.sleep(rng.uniform(0.02, 0.2))
        match rng.randrange(3):
            case 0:
                await engine.stop()
                await engine.start(int(engine.address.rpartition(":")[2]))
            case 1:
                engine.rejection = rng.choice([FULL, UNAVAILABLE])
                await asyncio.sleep(rng.uniform(0.02, 0.2))
                engine.rejection = None
            case 2:
                await engine.drain()
                await asyncio.sleep(rng.uniform(0.0, 0.1))
                await engine.stop()
                await engine.start(int(engine.address.rpartition(":")[2]))
