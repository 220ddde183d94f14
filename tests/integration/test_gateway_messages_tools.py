"""Tools and thinking of the Messages API, with Anthropic's client. The model's output is scripted, as hermes has it."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message

from support.chat import tool_tokenizer_files
from support.fake_engine import FakeEngine
from support.gateway import running_gateway
from support.scripted_turns import prompt_text, says

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"name": "get_weather", "description": "The weather", "input_schema": SCHEMA},
    {"name": "get_time", "input_schema": {"type": "object"}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NIGHT = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
QUESTION: Any = {"role": "user", "content": "The weather in Rome?"}


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(files=tool_tokenizer_files()) as engine:
        yield engine


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[AsyncAnthropic]:
    async with running_gateway(engine) as gateway, gateway.anthropic_client() as client:
        yield client


async def both(client: AsyncAnthropic, **fields: Any) -> Message:
    """The message as a whole, which is the same as what the client assembles from the stream."""
    arguments: Any = {"model": "fake", "max_tokens": 200, "messages": [QUESTION], "tools": TOOLS} | fields
    whole: Message = await client.messages.create(**arguments)
    async with client.messages.stream(**arguments) as stream:
        streamed = await stream.get_final_message()
    assert simplified(streamed) == simplified(whole)
    return whole


def simplified(message: Message) -> tuple[list[dict[str, Any]], str | None]:
    blocks = [block.model_dump(include={"type", "text", "thinking", "name", "input"}) for block in message.content]
    return blocks, message.stop_reason


async def test_text_calls_and_thinking_are_blocks(engine: FakeEngine, client: AsyncAnthropic) -> None:
    says(engine, f"<think>Look it up.</think>\n\nOne moment.\n{CALL}\n{NIGHT}")
    blocks, reason = simplified(await both(client))
    assert blocks == [
        {"type": "thinking", "thinking": "Look it up."},
        {"type": "text", "text": "One moment."},
        {"type": "tool_use", "name": "get_weather", "input": {"city": "Rome"}},
        {"type": "tool_use", "name": "get_time", "input": {}},
    ]
    assert reason == "tool_use"


async def test_thinking_can_be_left_out_of_the_answer(engine: FakeEngine, client: AsyncAnthropic) -> None:
    says(engine, "<think>Look it up.</think>\n\nWarm.")
    omitted = await both(client, thinking={"type": "adaptive", "display": "omitted"})
    assert simplified(omitted) == ([{"type": "text", "text": "Warm."}], "end_turn")


async def test_one_call_at_a_time(engine: FakeEngine, client: AsyncAnthropic) -> None:
    says(engine, f"{CALL}\n{NIGHT}")
    message = await both(client, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in message.content] == ["tool_use"]


async def test_the_result_of_a_call_is_in_the_next_prompt(engine: FakeEngine, client: AsyncAnthropic) -> None:
    says(engine, CALL)
    first = await both(client)
    says(engine, "It rains.")
    result = {"type": "tool_result", "tool_use_id": first.content[0].to_dict()["id"], "content": "heavy rain"}
    messages = [
        QUESTION,
        {"role": "assistant", "content": [block.to_dict() for block in first.content]},
        {"role": "user", "content": [result]},
    ]
    answer = await both(client, messages=messages)
    prompt = prompt_text(engine.requests[-1])
    assert '"get_weather"' in prompt
    assert "heavy rain" in prompt
    assert simplified(answer) == ([{"type": "text", "text": "It rains."}], "end_turn")
