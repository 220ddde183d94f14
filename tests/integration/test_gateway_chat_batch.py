"""`/v1/chat/completions/batch`: several conversations in one request, in front of a fake engine."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from support.fake_engine import FakeEngine, Reply, prompt_ids
from support.gateway import RunningGateway, running_gateway
from support.tokenizers import byte_level_tokenizer

PATH = "/v1/chat/completions/batch"


def say_the_last_word(request: Any) -> Reply:
    """Answer with the last word of the conversation."""
    text = byte_level_tokenizer().decode(prompt_ids(request)).split("\n")[-2].split()[-1]
    return Reply([*byte_level_tokenizer().encode(text).ids, 0])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def send(gateway: RunningGateway, *conversations: list[dict[str, str]], **fields: Any) -> httpx.Response:
    return await gateway.http.post(PATH, json={"model": "fake", "messages": conversations, **fields})


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(script=say_the_last_word, max_model_len=100) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: FakeEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine) as gateway:
        yield gateway


async def test_each_conversation_of_a_batch_has_a_choice_and_its_own_prompt(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    answer = (await send(gateway, [user("say one")], [user("x"), user("say two")], top_k=7)).json()
    assert [(choice["index"], choice["message"]["content"]) for choice in answer["choices"]] == [(0, "one"), (1, "two")]
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["prompt_tokens"] == sum(len(prompt_ids(request)) for request in engine.requests)
    assert [request.sampling_params.top_k for request in engine.requests] == [7, 7]


async def test_a_batch_has_token_ids_and_log_probabilities_of_each_choice(gateway: RunningGateway) -> None:
    fields = {"logprobs": True, "return_token_ids": True}
    choices = (await send(gateway, [user("one")], [user("two")], **fields)).json()["choices"]
    for choice, text in zip(choices, ("one", "two"), strict=True):
        assert choice["token_ids"][:-1] == byte_level_tokenizer().encode(text).ids
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


async def test_a_batch_cannot_be_streamed_and_has_one_choice_for_a_conversation(gateway: RunningGateway) -> None:
    for name, value in {"stream": True, "n": 2}.items():
        response = await send(gateway, [user("one")], [user("two")], **{name: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


async def test_an_error_in_one_conversation_is_the_batchs(gateway: RunningGateway, engine: FakeEngine) -> None:
    response = await send(gateway, [user("one")], [user("word " * 100)])
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    response = await send(gateway, [user("one")], [])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages[1]")
    assert engine.requests == []
