"""Prompt embeddings over HTTP: from a client's tensor to what an engine gets, and what is refused."""

import asyncio
import base64
import io
from array import array
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from proa.engine.v1 import service_pb2
from support.fake_engine import FakeEngine, prompt_ids, say
from support.gateway import RunningGateway, running_gateway, until
from support.otlp import OtlpReceiver

SIZE = 4


def encoded(tensor: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


ONES = encoded(torch.ones(2, SIZE))


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(script=say("Yes.")) as engine:
        engine.info.prompt_embeds_size = SIZE
        yield engine


@pytest.fixture
async def gateway(engine: FakeEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine, routing="prefix") as gateway:
        yield gateway


async def complete(gateway: RunningGateway, **fields: Any) -> Any:
    response = await gateway.http.post("/v1/completions", json={"model": "fake", **fields})
    return response.json()


async def test_an_engine_gets_the_tensor_s_values(engine: FakeEngine, gateway: RunningGateway) -> None:
    tensor = torch.arange(3 * SIZE).view(3, SIZE).to(torch.bfloat16)
    answer = await complete(gateway, prompt="", prompt_embeds=encoded(tensor))
    assert [choice["text"] for choice in answer["choices"]] == ["Yes."]
    assert answer["usage"]["prompt_tokens"] == 3
    (request,) = engine.requests
    (embeds,) = request.prompt_embeds
    assert (embeds.offset, embeds.num_tokens, embeds.type) == (0, 3, 3)
    assert embeds.values == tensor.view(torch.uint8).numpy().tobytes()
    assert prompt_ids(request) == [0, 0, 0]


async def test_embeddings_come_before_texts(engine: FakeEngine, gateway: RunningGateway) -> None:
    tensors = [encoded(torch.ones(length, SIZE)) for length in (2, 5)]
    answer = await complete(gateway, prompt="Hi", prompt_embeds=tensors)
    assert len(answer["choices"]) == 3
    assert [sum(each.num_tokens for each in request.prompt_embeds) for request in engine.requests] == [2, 5, 0]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt_embeds": "§"}, "prompt_embeds", "must be base64"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds", "as torch.save writes it"),
        ({"prompt_embeds": encoded(torch.ones(2, SIZE + 1))}, "prompt_embeds", "must have the shape [tokens, 4]"),
        ({"prompt_embeds": ONES, "echo": True}, "echo", "not supported with prompt_embeds"),
        ({"prompt_embeds": ONES, "prompt_logprobs": 1}, "prompt_logprobs", "not supported with prompt_embeds"),
        ({"prompt_embeds": ONES, "truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "not supported with prompt"),
        ({"prompt_embeds": ONES, "use_beam_search": True}, "use_beam_search", "not supported with prompt_embeds"),
        ({"prompt_embeds": ONES, "suffix": "!"}, "suffix", "suffix"),
        ({"prompt_embeds": ONES, "max_tokens": 0}, "max_tokens", "max_tokens"),
        ({"prompt_embeds": encoded(torch.ones(4096, SIZE))}, "prompt", "4096 tokens"),
        ({"prompt_embeds": []}, "prompt", "Field required"),
    ],
)
async def test_what_cannot_be_served_is_refused(
    gateway: RunningGateway, fields: dict[str, Any], param: str, message: str
) -> None:
    error = (await complete(gateway, **fields))["error"]
    assert error["param"] == param
    assert message in error["message"]


async def test_an_engine_without_them_refuses_them(engine: FakeEngine) -> None:
    engine.info.prompt_embeds_size = 0
    async with running_gateway(engine) as gateway:
        error = (await complete(gateway, prompt_embeds=encoded(torch.ones(2, SIZE))))["error"]
    assert error["code"] == "unsupported_parameter"
    assert "--enable-prompt-embeds" in error["message"]


async def test_each_choice_has_the_embeddings_and_its_limits(engine: FakeEngine, gateway: RunningGateway) -> None:
    fields: dict[str, Any] = {"n": 3, "max_tokens": 2, "temperature": 1, "logprobs": 1, "return_token_ids": True}
    answer = await complete(gateway, prompt_embeds=ONES, **fields)
    assert [choice["text"] for choice in answer["choices"]] == ["Ye"] * 3
    assert all(len(choice["logprobs"]["tokens"]) == 2 for choice in answer["choices"])
    assert answer["choices"][0]["prompt_token_ids"] == [0, 0]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (2, 6)
    assert [request.prompt_embeds[0].num_tokens for request in engine.requests] == [2, 2, 2]


async def test_another_engine_gets_the_embeddings_and_the_tokens_of_a_lost_one(engine: FakeEngine) -> None:
    engine.step_delay = None
    async with FakeEngine(script=say("Yes.")) as other:
        other.info.prompt_embeds_size = SIZE
        async with running_gateway(engine, other) as gateway:
            other.sleep_level = 1  # gets no request
            await until(lambda: sum(each.usable for each in gateway.gateway.pool.engines) == 1)
            create = gateway.openai.completions.create
            creating = asyncio.create_task(
                create(model="fake", prompt="", stream=True, extra_body={"prompt_embeds": ONES})
            )
            await engine.until(lambda engine: bool(engine.requests))
            await engine.step()
            stream = await creating
            other.sleep_level = 0
            await until(lambda: sum(each.usable for each in gateway.gateway.pool.engines) == 2)
            await engine.stop()
            chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Yes."
    assert array("I", other.requests[0].resumed_token_ids)
    assert other.requests[0].prompt_embeds == engine.requests[0].prompt_embeds


@pytest.mark.parametrize("is_enabled", [True, False])
async def test_a_prefill_engine_computes_embeddings_if_it_accepts_them(is_enabled: bool) -> None:
    movers: dict[str, FakeEngine] = {}
    async with (
        FakeEngine(movers=movers, role=service_pb2.ROLE_PREFILL) as prefill,
        FakeEngine(movers=movers, role=service_pb2.ROLE_DECODE) as decode,
    ):
        decode.info.prompt_embeds_size, prefill.info.prompt_embeds_size = SIZE, SIZE * is_enabled
        decode.prefill_rate = prefill.prefill_rate = 1000.0
        async with running_gateway(prefill, decode) as gateway:
            await until(lambda: prefill.num_kv_subscriptions > 0 and decode.num_kv_subscriptions > 0)
            answer = await complete(gateway, prompt_embeds=encoded(torch.ones(2000, SIZE)), max_tokens=2)
    assert answer["usage"]["prompt_tokens"] == 2000
    assert [request.prefill_only for request in prefill.requests] == [True] * is_enabled
    assert all(request.prompt_embeds == decode.requests[0].prompt_embeds for request in prefill.requests)
    assert decode.requests[0].HasField("kv_source") is is_enabled


async def test_the_request_s_span_has_the_number_of_embedded_tokens(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OtlpReceiver() as receiver:
        for name, value in receiver.environment.items():
            monkeypatch.setenv(name, value)
        async with running_gateway(engine) as gateway:
            await complete(gateway, prompt="Hi", prompt_embeds=[ONES, ONES])
            await complete(gateway, prompt="Hi")
        first, second = sorted((span for span in receiver.spans if span.kind == "SERVER"), key=lambda span: span.start)
    assert first.attributes["proa.embedded_tokens"] == 4
    assert "proa.embedded_tokens" not in second.attributes
