"""64 clients stream at once from the built-in model through gateway and engine; each gets its own tokens."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.processes import engine_process, gateway_process

STREAMS = 64
TOKENS = 16
ROUTE = "/v1/chat/completions"
QUESTIONS = (
    "What is {} plus {}?",
    "Tell me about a boat with {} sails and {} people.",
    "Who are you? Say it {} times, then {} times.",
    "Answer in JSON: how many are {} and {}?",
)


def body(index: int) -> dict[str, Any]:
    """The request body of a stream. Prompts differ; every fourth request samples with a seed."""
    question = QUESTIONS[index % len(QUESTIONS)].format(index, index // 3)
    return {
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0.8 if index % 4 == 3 else 0.0,
        "seed": index,
    }


async def stream(client: httpx.AsyncClient, index: int) -> str:
    """Stream a request and return its text. Asserts that the stream is complete."""
    text, finish_reasons, usage = "", [], None
    async with client.stream("POST", ROUTE, json=body(index)) as answer:
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for event in (json.loads(line[6:]) for line in lines[:-1]):
        assert "error" not in event
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            finish_reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert finish_reasons == ["length"]
    assert usage is not None
    assert usage["completion_tokens"] == TOKENS
    return text


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = engine_process("--model", "builtin", "--max-num-batched-tokens", "1024", env={"OMP_NUM_THREADS": "1"})
    with engine as (_, address), gateway_process(address) as (_, port):
        yield f"http://127.0.0.1:{port}"


@pytest.mark.timeout(300)
async def test_64_streams_at_once_are_each_equal_to_the_same_prompt_alone(url: str) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        alone = [await stream(client, index) for index in range(STREAMS)]
        together = await asyncio.gather(*(stream(client, index) for index in range(STREAMS)))
    assert together == alone
    assert len(set(alone)) > STREAMS // 2  # they are not all the same
