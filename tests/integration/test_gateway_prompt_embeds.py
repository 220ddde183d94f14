"""Prompt embeddings over HTTP: from a client's tensor to what an engine gets, and what is refused."""

import base64
import io
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from support.fake_engine import FakeEngine, prompt_ids, say
from support.gateway import RunningGateway, running_gateway

SIZE = 4


def encoded(tensor: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


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
        ({"prompt_embeds": encoded(torch.ones(2, SIZE)), "echo": True}, "echo", "not supported with prompt_embeds"),
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
