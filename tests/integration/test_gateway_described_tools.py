"""Tools for models whose chat template does not use them, or whose format of calls is not known."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from proa_gateway.serving.tools.described import DESCRIBED, UNKNOWN
from support.fake_engine import EOS, FakeEngine, Reply, prompt_ids, tokenizer_files
from support.gateway import RunningGateway, running_gateway
from support.tokenizers import byte_level_tokenizer

PLAIN = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
OWN_FORM = "{{ tools }}" + PLAIN
TOKENIZER = byte_level_tokenizer()
FUNCTION = {"name": "find", "description": "Find it.", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = '<tool_call>\n{"name": "find", "arguments": {"key": 1}}\n</tool_call>'
USER = {"role": "user", "content": "Hi"}
DESCRIPTION = f"You can call these functions:\n{json.dumps(FUNCTION)}"
FORM = 'To call one, write nothing but its call:\n<tool_call>\n{"name": "NAME", "arguments": {…}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "find"}}


@asynccontextmanager
async def serving(source: str, text: str = CALL, **options: Any) -> AsyncIterator[tuple[RunningGateway, FakeEngine]]:
    ids = TOKENIZER.encode(text).ids
    files = tokenizer_files() | {"chat_template.jinja": source.encode()}
    async with (
        FakeEngine(script=lambda request: Reply([*ids, EOS]), files=files) as engine,
        running_gateway(engine, **options) as gateway,
    ):
        yield gateway, engine


def prompt_of(engine: FakeEngine) -> str:
    return TOKENIZER.decode(prompt_ids(engine.requests[-1]), skip_special_tokens=False)


def calls_of(response: Any) -> list[tuple[str, str]]:
    assert response.status_code == 200, response.text
    calls = response.json()["choices"][0]["message"].get("tool_calls", ())
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_demanded_call_is_enforced_and_parsed(choice: Any) -> None:
    async with serving(PLAIN) as (gateway, engine):
        response = await gateway.chat(tools=[TOOL], tool_choice=choice)
        assert calls_of(response) == [("find", '{"key": 1}')]
        assert response.headers["x-proa-warnings"] == DESCRIBED
        grammar = engine.requests[-1].sampling_params.grammar
        assert "tool_call" in grammar.text
        assert not grammar.start_after
        assert not grammar.free_if_first
        assert prompt_of(engine) == f"<user>{DESCRIPTION}\n{FORM}\n\nHi</end>\n<assistant>"


async def test_an_offered_tool_is_described_and_its_calls_are_read() -> None:
    async with serving(PLAIN) as (gateway, engine):
        response = await gateway.chat(tools=[TOOL])
        assert calls_of(response) == [("find", '{"key": 1}')]
        assert response.headers["x-proa-warnings"] == DESCRIBED
        assert not engine.requests[-1].sampling_params.HasField("grammar")
        assert calls_of(await gateway.chat(tools=[TOOL], tool_choice="none")) == []
        assert prompt_of(engine) == "<user>Hi</end>\n<assistant>"


async def test_the_description_follows_a_system_message_and_the_history_has_the_same_form() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "find", "arguments": '{"key": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "found"},
    ]
    async with serving(PLAIN, "fine") as (gateway, engine):
        body = {"model": "fake", "messages": messages, "tools": [TOOL]}
        assert (await gateway.http.post("/v1/chat/completions", json=body)).status_code == 200
        expected = (
            f"<system>Be brief.\n\n{DESCRIPTION}\n{FORM}</end>\n<user>Hi</end>\n<assistant>{CALL}</end>\n"
            "<user>[result of find]\nfound</end>\n<assistant>"
        )
        assert prompt_of(engine) == expected
        counted = (await gateway.http.post("/tokenize", json=body)).json()
        assert counted["tokens"] == prompt_ids(engine.requests[-1])


async def test_a_named_format_shows_no_form() -> None:
    async with serving(PLAIN, tool_call_parser="hermes") as (gateway, engine):
        assert calls_of(await gateway.chat(tools=[TOOL])) == [("find", '{"key": 1}')]
        assert prompt_of(engine) == f"<user>{DESCRIPTION}\n\nHi</end>\n<assistant>"


async def test_an_unknown_format_of_a_template_with_tools_is_said() -> None:
    async with serving(OWN_FORM) as (gateway, engine):
        response = await gateway.chat(tools=[TOOL])
        assert calls_of(response) == [("find", '{"key": 1}')]
        assert response.headers["x-proa-warnings"] == UNKNOWN
        assert "You can call" not in prompt_of(engine)
        response = await gateway.chat(tools=[TOOL], tool_choice="required")
        assert "x-proa-warnings" not in response.headers
        assert engine.requests[-1].sampling_params.grammar.text


async def test_responses_and_messages_call_too() -> None:
    async with serving(PLAIN) as (gateway, _):
        tool = {"type": "function", **FUNCTION}
        body: dict[str, Any] = {"model": "fake", "input": "Hi", "tools": [tool], "tool_choice": "required"}
        response = (await gateway.http.post("/v1/responses", json=body)).json()
        assert [(item["name"], item["arguments"]) for item in response["output"]] == [("find", '{"key": 1}')]
        tool = {"name": "find", "input_schema": FUNCTION["parameters"]}
        body = {"model": "fake", "messages": [USER], "tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 99}
        message = (await gateway.http.post("/v1/messages", json=body)).json()
        assert [(block["name"], block["input"]) for block in message["content"]] == [("find", {"key": 1})]
