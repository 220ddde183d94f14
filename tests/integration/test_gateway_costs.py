"""Limits of what one request may cost: each is an error that names its field, and others are served meanwhile."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.fake_engine import FakeEngine, say
from support.gateway import RunningGateway, running_gateway


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    async with FakeEngine(script=say("one")) as engine, running_gateway(engine) as gateway:
        yield gateway


def tools(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{number}"}} for number in range(count)]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": tools(1025)}, "tools", "at most 1024"),
        ({"tools": [*tools(900), *tools(1)]}, "tools", "'f0' is there twice"),
        ({"messages": [{"role": "user", "content": "Hi"}] * 4097}, "messages", "at most 4096"),
        ({"messages": ["a"] * 4000}, "messages[0]", "valid dictionary"),
        ({"bad_words": ["a" * 4097]}, "bad_words", "4,096 characters in all"),
        ({"stop_token_ids": [5] * 1000}, "stop_token_ids", "more token ids than the model has tokens"),
        ({"model": "a" * 2000}, "model", "more than 1024 characters"),
        (
            {"messages": [{"role": "user", "content": "a" * 4_000_000}]},
            "messages",
            "length is 4096 tokens. However, the prompt's 4000018 characters have more",
        ),
        ({f"unknown{number}": 1 for number in range(1025)}, None, "1025 unknown fields"),
    ],
)
async def test_what_costs_too_much_is_refused(
    gateway: RunningGateway, fields: dict[str, Any], param: str | None, message: str
) -> None:
    answer = await gateway.chat(**fields)
    assert answer.status_code == 400, answer.text[:500]
    assert answer.json()["error"]["param"] == param
    assert message in answer.json()["error"]["message"]
    assert (await gateway.chat()).status_code == 200


@pytest.mark.parametrize("side", ["left", "right"])
async def test_a_text_that_is_truncated_may_be_long(gateway: RunningGateway, side: str) -> None:
    body = {"model": "fake", "prompt": "a" * 2_000_000 + "b" * 2_000_000, "max_tokens": 1, "echo": True}
    body |= {"truncate_prompt_tokens": 5, "truncation_side": side}
    answer = (await gateway.http.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["text"].startswith("bbbbb" if side == "left" else "aaaaa")
    assert answer["usage"]["prompt_tokens"] == 5


async def test_the_keys_of_choices_differ_and_the_rest_is_the_same(gateway: RunningGateway) -> None:
    answer = await gateway.chat(n=3, stop_token_ids=[7, 7, 8], bad_words=["bad"])
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == 3


async def test_long_texts_are_counted_in_pieces(gateway: RunningGateway) -> None:
    tokenizer = gateway.gateway.models.get("fake").tokenizer
    text = "é" * 200_000  # a token each
    assert await tokenizer.has_more_tokens(text, 90_000)
    assert not await tokenizer.has_more_tokens(text, 210_000)
    assert await tokenizer.has_more_tokens("é" * 300_000, 100)
