"""Tools through the gateway with the built-in model: question, call, result, answer."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from support.processes import engine_process, gateway_process

MODEL = "proa-builtin"
SECONDS = 60  # far more than any answer takes, on a busy machine


def tool(name: str, description: str, **types: str) -> dict[str, Any]:
    properties = {parameter: {"type": kind} for parameter, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool("get_weather", "Get the weather in a city", city="string"),
    tool("add", "Add two numbers", a="integer", b="integer"),
]
QUESTION = {"role": "user", "content": "What is the weather in Lisbon?"}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    engine = engine_process("--model=builtin", "--max-num-batched-tokens=256", env={"OMP_NUM_THREADS": "1"})
    with engine as (_, address), gateway_process(address) as (_, port):
        yield port


@pytest.fixture
async def client(port: int) -> AsyncIterator[AsyncOpenAI]:
    url = f"http://127.0.0.1:{port}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=SECONDS) as made:
        yield made


async def chat(client: AsyncOpenAI, messages: list[Any], **fields: Any) -> Any:
    """The first choice of a greedy completion."""
    arguments: dict[str, Any] = {"tools": TOOLS, "temperature": 0} | fields
    completion = await client.chat.completions.create(model=MODEL, messages=messages, **arguments)
    return completion.choices[0]


async def test_question_becomes_a_call_and_its_result_an_answer(client: AsyncOpenAI) -> None:
    asked = await chat(client, [QUESTION])
    assert asked.finish_reason == "tool_calls"
    (call,) = asked.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Lisbon"})

    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "condition": "sunny"}'}
    answered = await chat(client, [QUESTION, asked.message.model_dump(exclude_none=True), result])
    assert answered.finish_reason == "stop"
    assert answered.message.content.startswith("It is sunny in ")
    assert answered.message.content.endswith(", with 21 degrees.")


async def test_call_is_streamed(client: AsyncOpenAI) -> None:
    arguments: Any = {"messages": [QUESTION], "tools": TOOLS, "temperature": 0}
    async with client.chat.completions.stream(model=MODEL, **arguments) as stream:
        async for _ in stream:
            pass
        choice: Any = (await stream.get_final_completion()).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Lisbon"})


async def test_question_that_needs_no_tool_is_answered(client: AsyncOpenAI) -> None:
    choice = await chat(client, [{"role": "user", "content": "What is the capital of France?"}])
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is None
    assert choice.message.content == "The capital of France is Paris."


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
async def test_forced_call_has_arguments_of_the_schema(client: AsyncOpenAI, choice: Any) -> None:
    asked = await chat(client, [{"role": "user", "content": "What is 123 plus 508?"}], tool_choice=choice)
    (call,) = asked.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 123, "b": 508})
