"""Outputs that may be longer than the model's context: coding agents ask for 32,000 tokens by default."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.fake_engine import FakeEngine, say
from support.gateway import RunningGateway, chat_body, running_gateway

CONTEXT = 100  # tokens
MESSAGES = [{"role": "user", "content": "Hi"}]
# The path, the body, and the field and value that say that the output was cut.
ENDS: list[tuple[str, dict[str, Any], str, Any]] = [
    ("/v1/chat/completions", chat_body(max_tokens=32_000), "finish_reason", "length"),
    ("/v1/chat/completions", chat_body(max_completion_tokens=95), "finish_reason", "length"),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 32_000}, "finish_reason", "length"),
    ("/generate", {"text": "Hi", "sampling_params": {"max_new_tokens": 32_000}}, "type", "length"),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 32_000}, "reason", "max_output_tokens"),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 32_000}, "stop_reason", "model_context_window_exceeded"),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 10}, "stop_reason", "max_tokens"),
]


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(script=say(" word", repeat=True), max_model_len=CONTEXT) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: FakeEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine) as gateway:
        yield gateway


def found(value: Any, name: str) -> list[Any]:
    """All values of fields of this name."""
    if isinstance(value, dict):
        inner = [each for entry in value.values() for each in found(entry, name)]
        return [value[name], *inner] if name in value else inner
    return [each for entry in value for each in found(entry, name)] if isinstance(value, list) else []


@pytest.mark.parametrize(("path", "body", "name", "end"), ENDS)
async def test_an_output_ends_at_the_context_whatever_its_limit(
    gateway: RunningGateway, path: str, body: dict[str, Any], name: str, end: str
) -> None:
    response = await gateway.http.post(path, json={"model": "fake", **body})
    assert response.status_code == 200, response.text
    assert end in found(response.json(), name), response.text
    if "x-proa-ignored-fields" in response.headers:
        assert "max" not in response.headers["x-proa-ignored-fields"]


@pytest.mark.parametrize("num_tokens", [CONTEXT - 1, CONTEXT, CONTEXT + 1])
async def test_only_a_prompt_that_leaves_no_room_is_refused(gateway: RunningGateway, num_tokens: int) -> None:
    response = await gateway.complete([5] * num_tokens, max_tokens=50)
    if num_tokens < CONTEXT:
        assert response.json()["usage"]["completion_tokens"] == 1
    else:
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert f"{num_tokens} tokens, which leaves no room" in error["message"]


@pytest.mark.parametrize("prompt", [[5] * CONTEXT, "word " * CONTEXT, "x" * 1_000_000])
async def test_clients_recognise_a_prompt_that_is_too_long(gateway: RunningGateway, prompt: list[int] | str) -> None:
    """By their words: counted in tokens, or known to be too long from its characters."""
    message = (await gateway.complete(prompt)).json()["error"]["message"]
    assert message.startswith(f"This model's maximum context length is {CONTEXT} tokens. However, ")
    assert message.endswith("Please reduce the length of the input prompt.")


async def test_the_prompts_of_one_request_end_one_by_one(gateway: RunningGateway) -> None:
    answer = (await gateway.complete([[5] * 90, [5] * 40], max_tokens=30)).json()
    assert answer["usage"]["completion_tokens"] == 10 + 30
