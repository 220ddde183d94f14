"""Embeddings of inputs that are longer than the model's context."""

import math
from array import array
from collections.abc import AsyncIterator
from typing import Any

import pytest

from proa.engine.v1 import core_pb2
from support.fake_engine import FakeEngine, pool, prompt_ids
from support.gateway import RunningGateway, running_gateway

CONTEXT, LONGEST = 10, 40  # tokens
IDS = [number * 7 % 89 + 3 for number in range(24)]
PARTS = [IDS[:10], IDS[10:20], IDS[20:]]


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    tasks = (core_pb2.POOLING_TASK_EMBED, core_pb2.POOLING_TASK_TOKEN_EMBED)
    async with FakeEngine(pooling_tasks=tasks, max_model_len=CONTEXT, max_embed_len=LONGEST) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: FakeEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine) as gateway:
        yield gateway


def embedding(token_ids: list[int], **params: Any) -> list[float]:
    request = core_pb2.EngineCoreRequest(prompt_token_ids=array("I", token_ids).tobytes())
    request.pooling_params.CopyFrom(core_pb2.PoolingParams(task=core_pb2.POOLING_TASK_EMBED, **params))
    return pool(request)[0]


def weighted_sum(parts: list[list[float]]) -> list[float]:
    scaled = [[len(ids) * value for value in part] for ids, part in zip(PARTS, parts, strict=True)]
    return [sum(values) for values in zip(*scaled, strict=True)]


async def test_the_embedding_of_a_long_input_is_the_normalized_mean_of_its_parts(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    answer = await gateway.openai.embeddings.create(model="fake", input=[[5, 6], IDS, [7]])
    assert sorted(map(prompt_ids, engine.requests)) == sorted([[5, 6], *PARTS, [7]])
    total = weighted_sum([embedding(ids) for ids in PARTS])
    expected = [embedding([5, 6]), [value / math.hypot(*total) for value in total], embedding([7])]
    for item, values in zip(answer.data, expected, strict=True):
        assert item.embedding == pytest.approx(values, abs=1e-6)
    assert answer.usage.prompt_tokens == len(IDS) + 3


async def test_parts_that_are_not_normalized_give_their_mean(gateway: RunningGateway) -> None:
    response = await gateway.http.post("/v1/embeddings", json={"input": IDS, "use_activation": False, "dimensions": 4})
    total = weighted_sum([embedding(ids, use_activation=False, dimensions=4) for ids in PARTS])
    expected = [value / len(IDS) for value in total]
    assert response.json()["data"][0]["embedding"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("path", "fields", "limit"),
    [("/v1/embeddings", {"input": [3] * 41}, LONGEST), ("/pooling", {"input": IDS, "task": "token_embed"}, CONTEXT)],
)
async def test_longer_inputs_and_those_of_other_tasks_are_errors(
    gateway: RunningGateway, path: str, fields: dict[str, Any], limit: int
) -> None:
    response = await gateway.http.post(path, json=fields)
    assert response.status_code == 400
    assert f"maximum context length is {limit} tokens" in response.json()["error"]["message"]


async def test_a_long_input_that_is_to_be_cut_is_not_divided(gateway: RunningGateway, engine: FakeEngine) -> None:
    response = await gateway.http.post("/v1/embeddings", json={"input": IDS, "truncate_prompt_tokens": -1})
    assert response.status_code == 200
    assert [prompt_ids(each) for each in engine.requests] == [IDS[:CONTEXT]]
