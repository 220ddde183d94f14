"""Embeddings of chunks of a text, with an engine that computes values from its prompts without a model."""

import math
from array import array
from base64 import b64decode
from collections.abc import AsyncIterator
from typing import Any

import pytest

from proa.engine.v1 import core_pb2
from support.fake_engine import FakeEngine, pool
from support.gateway import RunningGateway, running_gateway
from support.tokenizers import byte_level_tokenizer

TEXT = "Berlin has museums. \u4e2d\u6587 \U0001f600"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": [3, 4]}, "input"),
    ({"input": ["a", ""]}, "input"),
    ({"input": None, "messages": [{"role": "user", "content": "Hi"}]}, "messages"),
    ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
    ({"encoding_format": "bytes"}, "encoding_format"),
    ({"late_chunking_params": {"chunk_size": 0}}, "late_chunking_params.chunk_size"),
    ({"late_chunking_params": {"chunk_size": 2, "overlap": 1}}, "late_chunking_params.overlap"),
]


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    tasks = [core_pb2.POOLING_TASK_TOKEN_EMBED]
    async with FakeEngine(pooling_tasks=tasks) as engine, running_gateway(engine) as gateway:
        yield gateway


async def embed(gateway: RunningGateway, chunk_size: int, **fields: Any) -> dict[str, Any]:
    body = {"input": TEXT, "late_chunking_params": {"chunk_size": chunk_size}, **fields}
    response = await gateway.http.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    item: dict[str, Any] = response.json()["data"][0]
    return item


def means(chunk_size: int) -> list[list[float]]:
    """Of the embeddings of tokens that are not normalized."""
    request = core_pb2.EngineCoreRequest(prompt_token_ids=array("I", byte_level_tokenizer().encode(TEXT).ids).tobytes())
    task = core_pb2.POOLING_TASK_TOKEN_EMBED
    request.pooling_params.CopyFrom(core_pb2.PoolingParams(task=task, use_activation=False))
    rows = pool(request)
    chunks = [rows[start : start + chunk_size] for start in range(0, len(rows), chunk_size)]
    return [[sum(column) / len(chunk) for column in zip(*chunk, strict=True)] for chunk in chunks]


@pytest.mark.parametrize("chunk_size", [1, 4, 2**63 - 1])
async def test_a_chunks_embedding_is_the_mean_of_its_tokens(gateway: RunningGateway, chunk_size: int) -> None:
    found = (await embed(gateway, chunk_size, use_activation=False))["embedding"]
    for actual, expected in zip(found, means(chunk_size), strict=True):
        assert actual == pytest.approx(expected, abs=1e-6)


async def test_it_has_length_one_by_default(gateway: RunningGateway) -> None:
    found = (await embed(gateway, 4))["embedding"]
    for actual, mean in zip(found, means(4), strict=True):
        assert actual == pytest.approx([value / math.hypot(*mean) for value in mean], abs=1e-6)
    encoded = (await embed(gateway, 4, encoding_format="base64"))["embedding"]
    assert array("f", b64decode(encoded)).tolist() == [value for row in found for value in row]


async def test_the_response_has_the_tokens_and_characters_of_each_chunk(gateway: RunningGateway) -> None:
    encoding = byte_level_tokenizer().encode(TEXT)
    described = (await embed(gateway, 4))["late_chunking"]
    assert (described["strategy"], described["chunk_size"]) == ("fixed_tokens", 4)
    assert described["input_tokens"] == len(encoding.ids)
    end = len(encoding.ids)
    for index, chunk in enumerate(described["chunks"]):
        assert chunk["token_range"] == [4 * index, min(4 * index + 4, end)]
        offsets = [pair for pair in encoding.offsets[slice(*chunk["token_range"])] if pair[0] < pair[1]]
        assert chunk["char_range"] == [min(first for first, _ in offsets), max(last for _, last in offsets)]
    assert described["chunks"][-1]["char_range"][1] == len(TEXT)


async def test_what_cannot_be_divided_is_refused_by_name(gateway: RunningGateway) -> None:
    for fields, param in REFUSED:
        body = {"input": TEXT, "late_chunking_params": {"chunk_size": 4}, **fields}
        response = await gateway.http.post("/v1/embeddings", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
