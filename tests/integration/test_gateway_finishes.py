"""Metrics of finish reasons: they count what the client received."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from proa.engine.v1 import core_pb2
from proa_gateway.config import Deadlines
from support.fake_engine import EOS, FakeEngine, Reply, say
from support.gateway import RunningGateway, chat_body, running_gateway
from support.scrape import Scrape

CHAT = "/v1/chat/completions"
IMPATIENT = Deadlines(connect=10.0, heartbeat=10.0, first_token=20, next_token=0.4)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(script=say("one two three")) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: FakeEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine, deadlines=IMPATIENT) as gateway:
        yield gateway


def finishes(gateway: RunningGateway) -> dict[str, float]:
    """Finish reason -> number of sequences."""
    samples = page(gateway).samples.items()
    return {
        dict(labels)["reason"]: value
        for (name, labels), value in samples
        if name == "proa_gateway_finished_sequences_total" and ("gen_ai_request_model", "fake") in labels
    }


def page(gateway: RunningGateway) -> Scrape:
    return Scrape(gateway.gateway.metrics.render().decode())


async def answer(gateway: RunningGateway, *, stream: bool, **fields: Any) -> None:
    if stream:
        await gateway.events(CHAT, chat_body(**fields))
    else:
        await gateway.chat(**fields)


@pytest.mark.parametrize("stream", [False, True])
async def test_sequences_are_counted_by_the_finish_reason_in_the_response(
    gateway: RunningGateway, engine: FakeEngine, stream: bool
) -> None:
    await answer(gateway, stream=stream)
    await answer(gateway, stream=stream, stop="wo", n=2)
    await answer(gateway, stream=stream, max_tokens=1)
    engine.script = lambda request: Reply([5], finish_reason=core_pb2.FINISH_REASON_ABORT)
    await answer(gateway, stream=stream)
    assert finishes(gateway) == {"stop": 3, "length": 1, "abort": 1}
    assert page(gateway).value("proa_gateway_requests_total", route=CHAT, status="200", error_type="") == 4


async def test_an_error_counts_for_all_choices_of_a_response_that_is_not_streamed(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    replies = iter((Reply([5]), Reply([5], finish_reason=core_pb2.FINISH_REASON_ERROR, error="left its grammar")))
    engine.script = lambda request: next(replies)
    assert (await gateway.chat(n=2)).status_code == 400
    assert finishes(gateway) == {"error": 2}
    requests = page(gateway).value("proa_gateway_requests_total", status="400", error_type="grammar_failed")
    assert requests == 1


async def test_a_stream_that_fails_has_status_200_and_an_error_type(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    engine.step_delay = None
    replies = iter((Reply([5, EOS]), Reply([5], repeat=True)))
    engine.script = lambda request: next(replies)
    stream = asyncio.create_task(gateway.events(CHAT, chat_body(n=2)))
    await engine.until(lambda engine: engine.num_unfinished == 2)
    for _ in range(4):
        await engine.step()
    assert (await stream)[-2]["error"]["code"] == "engine_timeout"
    assert finishes(gateway) == {"stop": 1, "error": 1}
    assert page(gateway).value("proa_gateway_requests_total", status="200", error_type="engine_timeout") == 1
    with pytest.raises(KeyError):
        page(gateway).value("proa_gateway_requests_total", route=CHAT, error_type="")


async def test_a_disconnect_counts_as_client_disconnected(gateway: RunningGateway, engine: FakeEngine) -> None:
    engine.step_delay = None
    task = asyncio.create_task(gateway.chat(n=3))
    await engine.until(lambda engine: engine.num_unfinished == 3)
    task.cancel()
    await engine.until(lambda engine: engine.num_unfinished == 0)
    assert finishes(gateway) == {"client_disconnected": 3}


async def test_requests_that_never_generated_have_an_error_type_and_no_finish_reason(gateway: RunningGateway) -> None:
    await gateway.chat(temperature=3)
    await gateway.chat(model="other")
    await gateway.http.get("/v2/nothing")
    assert finishes(gateway) == {}
    for route, status, error_type in (
        (CHAT, "400", "invalid_value"),
        (CHAT, "404", "model_not_found"),
        ("none", "404", "404"),
    ):
        labels = {"route": route, "status": status, "error_type": error_type}
        assert page(gateway).value("proa_gateway_requests_total", **labels) == 1
