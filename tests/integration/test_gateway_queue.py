"""Requests wait in the gateway while the engines are full or the first one starts; over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from proa_gateway.config import Deadlines
from support.fake_engine import FakeEngine, prompt_ids, say
from support.gateway import PATIENT, RunningGateway, chat_body, events_of, running_gateway, until
from support.otlp import OtlpReceiver
from support.processes import fake_engine_process, free_port, gateway_process
from support.scrape import Scrape

BATCH, SPARE = 8, 1


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    """Steps only when the test says so, or sets its delay."""
    async with FakeEngine(script=say("one two"), step_delay=None, max_num_seqs=BATCH) as engine:
        yield engine


async def scrape(gateway: RunningGateway) -> Scrape:
    return Scrape((await gateway.http.get("/metrics")).text)


async def depth(gateway: RunningGateway) -> float:
    return (await scrape(gateway)).value("proa_gateway_queue_depth", model="fake")


def ask(gateway: RunningGateway, count: int, **fields: Any) -> list[asyncio.Task[httpx.Response]]:
    return [asyncio.create_task(gateway.complete([1, 2, 3], **fields)) for _ in range(count)]


async def fill(gateway: RunningGateway, engine: FakeEngine, **fields: Any) -> list[asyncio.Task[httpx.Response]]:
    """Send as many requests as the gateway sends to the engine."""
    tasks = ask(gateway, BATCH + SPARE, **fields)
    await engine.until(lambda engine: engine.num_unfinished == BATCH + SPARE)
    return tasks


async def waiting(gateway: RunningGateway, count: int) -> None:
    await until(lambda: gateway.gateway.admission.queue.num_waiting == count)


def error_code(response: httpx.Response) -> str:
    code: str = response.json()["error"]["code"]
    return code


async def test_an_engine_gets_a_full_batch_and_an_eighth_more_and_the_rest_waits(engine: FakeEngine) -> None:
    async with running_gateway(engine) as gateway:
        assert await depth(gateway) == 0
        tasks = ask(gateway, 40)
        await engine.until(lambda engine: engine.num_unfinished == BATCH + SPARE)
        await waiting(gateway, 40 - BATCH - SPARE)
        assert await depth(gateway) == 40 - BATCH - SPARE
        engine.step_delay = 0.0
        assert [(await task).status_code for task in tasks] == [200] * 40
        page = await scrape(gateway)
        assert page.value("proa_gateway_queue_depth", model="fake") == 0
        waits = page.value("proa_gateway_queue_wait_seconds_count", model="fake", outcome="admitted")
        assert waits == 40 - BATCH - SPARE


async def test_the_capacity_of_all_engines_counts(engine: FakeEngine) -> None:
    async with (
        FakeEngine(script=say("one"), step_delay=None, max_num_seqs=BATCH) as other,
        running_gateway(engine, other) as gateway,
    ):
        tasks = ask(gateway, 30)
        await waiting(gateway, 30 - 2 * (BATCH + SPARE))
        engine.step_delay = other.step_delay = 0.0
        assert [(await task).status_code for task in tasks] == [200] * 30


async def test_waiting_requests_are_served_by_priority(engine: FakeEngine) -> None:
    async with running_gateway(engine) as gateway:
        tasks = await fill(gateway, engine)
        for index, priority in enumerate((5, -1, 0, 5, -1)):
            tasks.append(asyncio.create_task(gateway.complete([100 + index], priority=priority)))
            await waiting(gateway, index + 1)
        engine.step_delay = 0.0
        await asyncio.gather(*tasks)
        assert [prompt_ids(request)[0] for request in engine.requests[-5:]] == [101, 104, 102, 100, 103]


async def test_a_request_whose_client_disconnects_while_it_waits_never_reaches_an_engine(engine: FakeEngine) -> None:
    async with running_gateway(engine) as gateway:
        tasks = await fill(gateway, engine)
        leaving = asyncio.create_task(gateway.complete([99]))
        await waiting(gateway, 1)
        leaving.cancel()
        await waiting(gateway, 0)
        assert await depth(gateway) == 0
        engine.step_delay = 0.0
        assert [(await task).status_code for task in tasks] == [200] * len(tasks)
        assert [99] not in [prompt_ids(request) for request in engine.requests]


@pytest.mark.parametrize(
    ("limit", "reason"), [({"max_waiting_requests": 2}, "waiting"), ({"max_queued_tokens": 6}, "tokens")]
)
async def test_a_full_queue_rejects_at_once_and_a_long_wait_ends_in_an_error_to_retry(
    engine: FakeEngine, limit: dict[str, Any], reason: str
) -> None:
    deadlines = Deadlines(connect=10, heartbeat=10, shutdown=5, queue=1.0)
    async with running_gateway(engine, deadlines=deadlines, **limit) as gateway:
        tasks = await fill(gateway, engine)
        late = ask(gateway, 2)
        await waiting(gateway, 2)
        refused = await gateway.complete([1])
        assert (refused.status_code, error_code(refused), refused.headers["retry-after"]) == (429, "overloaded", "1")
        for response in await asyncio.gather(*late):
            assert (response.status_code, error_code(response)) == (503, "queue_timeout")
            assert response.headers["retry-after"] == "5"
        page = await scrape(gateway)
        assert page.value("proa_gateway_admission_rejections_total", reason=reason) == 1
        assert page.value("proa_gateway_admission_rejections_total", reason="queue_timeout") == 2
        engine.step_delay = 0.0
        assert [(await task).status_code for task in tasks] == [200] * len(tasks)


async def test_a_requests_own_time_limit_ends_its_wait(engine: FakeEngine) -> None:
    async with running_gateway(engine) as gateway:
        tasks = await fill(gateway, engine)
        body = {"model": "fake", "prompt": "Hi"}
        late = await gateway.http.post("/v1/completions", json=body, headers={"x-request-timeout": "0.5"})
        assert (late.status_code, error_code(late)) == (503, "queue_timeout")
        engine.step_delay = 0.0
        await asyncio.gather(*tasks)


async def test_shutdown_rejects_waiting_requests_and_lets_running_ones_end(engine: FakeEngine) -> None:
    async with running_gateway(engine) as gateway:
        running = await fill(gateway, engine)
        waits = ask(gateway, 3)
        await waiting(gateway, 3)
        gateway.gateway.admission.queue.close()
        for response in await asyncio.gather(*waits):
            assert (response.status_code, error_code(response)) == (503, "shutting_down")
            assert response.headers["retry-after"] == "1"
        engine.step_delay = 0.0
        assert [(await task).status_code for task in running] == [200] * len(running)


async def test_sigterm_answers_all_requests_within_the_drain_timeout() -> None:
    """With real processes: requests that wait for capacity or for an engine are rejected, running ones end."""
    with (
        fake_engine_process("--repeat", "--step-delay", "0.05", "--max-num-seqs", "2") as (_, address),
        gateway_process(address, "--model", "coming", "--scale-from-zero-timeout", "60") as (process, port),
    ):
        body = {"model": "fake", "prompt": "Hi", "max_tokens": 40}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:

            async def value(name: str) -> float:
                return Scrape((await client.get("/metrics")).text).value(name)

            while await value("proa_gateway_sessions") < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(8)]
            tasks.append(asyncio.create_task(client.post("/v1/completions", json={**body, "model": "coming"})))
            while await value("proa_gateway_queue_depth") < 6:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            process.terminate()
            responses = await asyncio.gather(*tasks)
        statuses = sorted(response.status_code for response in responses)
        assert statuses == [200] * 3 + [503] * 6
        assert {error_code(response) for response in responses if response.status_code == 503} == {"shutting_down"}
        assert process.wait(15) == 0


async def test_requests_wait_until_the_first_engine_is_up() -> None:
    port = free_port()
    deadlines = Deadlines(connect=10, heartbeat=10, shutdown=5, scale_from_zero=20.0)
    settings: dict[str, Any] = {"ready": False, "deadlines": deadlines, "models": ("fake",)}
    async with running_gateway(f"127.0.0.1:{port}", **settings) as gateway:
        assert (await gateway.http.get("/ready")).status_code == 200
        (card,) = (await gateway.http.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("fake", None)
        assert (await gateway.http.get("/v1/models/fake")).status_code == 200
        assert (await gateway.chat(model="other")).status_code == 503  # an engine that is to connect may serve it
        held = [*ask(gateway, 3), asyncio.create_task(gateway.chat())]
        stream = asyncio.create_task(gateway.events("/v1/chat/completions", chat_body()))
        unnamed = asyncio.create_task(gateway.http.post("/v1/completions", json={"prompt": "Hi"}))
        gone = asyncio.create_task(gateway.chat())
        await waiting(gateway, 7)
        assert await depth(gateway) == 7
        gone.cancel()
        await waiting(gateway, 6)
        async with FakeEngine(script=say("one two")) as engine:
            await engine.stop()
            await engine.start(port)
            assert [(await task).status_code for task in [*held, unnamed]] == [200] * 5
            assert (await stream)[-1] == "[DONE]"
            assert await depth(gateway) == 0
            (card,) = (await gateway.http.get("/v1/models")).json()["data"]
            assert card["max_model_len"] == 4096
        # Its model stays known, and requests wait for it again.
        await until(lambda: not gateway.gateway.pool.ready)
        again = asyncio.create_task(gateway.chat())
        await waiting(gateway, 1)
        assert (await gateway.chat(model="other")).status_code == 404
        again.cancel()


async def test_a_long_wait_for_an_engine_ends_in_an_error_to_retry_and_too_many_are_rejected() -> None:
    deadlines = Deadlines(connect=10, heartbeat=10, shutdown=5, scale_from_zero=1.0)
    async with running_gateway(
        "127.0.0.1:1", ready=False, deadlines=deadlines, models=("fake",), max_waiting_requests=2
    ) as gateway:
        held = ask(gateway, 2)
        await waiting(gateway, 2)
        assert (await gateway.complete()).status_code == 429
        for response in await asyncio.gather(*held):
            assert (response.status_code, error_code(response)) == (503, "engine_unavailable")
            assert response.headers["retry-after"] == "5"


async def test_requests_wait_for_an_engine_only_with_the_flag() -> None:
    async with running_gateway("127.0.0.1:1", ready=False, models=("fake",)) as gateway:
        assert (await gateway.http.get("/ready")).status_code == 503
        response = await gateway.complete()
        assert (response.status_code, error_code(response)) == (503, "engine_unavailable")


async def test_an_unknown_model_is_not_found_although_known_ones_are_waited_for() -> None:
    deadlines = Deadlines(connect=10, heartbeat=10, shutdown=5, scale_from_zero=20.0)
    async with running_gateway(deadlines=deadlines, models=("fake",)) as gateway:
        unknown = await gateway.complete(model="other")
        assert (unknown.status_code, error_code(unknown)) == (404, "model_not_found")


async def test_the_admission_span_lasts_as_long_as_the_wait(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OtlpReceiver() as receiver:
        for name, value in receiver.environment.items():
            monkeypatch.setenv(name, value)
        async with running_gateway(engine, deadlines=PATIENT) as gateway:
            tasks = await fill(gateway, engine)
            tasks += ask(gateway, 1)
            await waiting(gateway, 1)
            await asyncio.sleep(0.3)
            engine.step_delay = 0.0
            await asyncio.gather(*tasks)
        spans = [span for span in receiver.spans if span.name == "admission"]
        assert len(spans) == len(tasks)
        assert sum(span.end - span.start > 0.3e9 for span in spans) == 1


async def test_a_stream_sends_nothing_while_it_waits_and_then_streams(engine: FakeEngine) -> None:
    async with running_gateway(engine) as gateway:
        tasks = await fill(gateway, engine)

        async def stream() -> list[Any]:
            body = chat_body(stream=True)
            async with gateway.http.stream("POST", "/v1/chat/completions", json=body) as response:
                assert response.status_code == 200
                return [event async for event in events_of(response)]

        streaming = asyncio.create_task(stream())
        await waiting(gateway, 1)
        engine.step_delay = 0.0
        assert (await streaming)[-1] == "[DONE]"
        await asyncio.gather(*tasks)
