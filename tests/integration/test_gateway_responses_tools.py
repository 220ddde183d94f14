"""Tools and reasoning of the Responses API. The model's output is scripted, as hermes has it."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from support.chat import tool_tokenizer, tool_tokenizer_files
from support.fake_engine import FakeEngine
from support.gateway import running_gateway
from support.scripted_turns import prompt_text, says

TOKENIZER = tool_tokenizer()
EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "name": "get_weather", "description": "The weather", "parameters": SCHEMA, "strict": True},
    {"type": "function", "name": "get_time", "parameters": {"type": "object"}, "strict": False},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(files=tool_tokenizer_files()) as engine:
        yield engine


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[AsyncOpenAI]:
    async with running_gateway(engine) as gateway:
        yield gateway.openai


async def both(client: AsyncOpenAI, **fields: Any) -> Response:
    """The response as a whole, which is the same as what the client assembles from the stream."""
    arguments: Any = {"model": "fake", "input": "The weather in Rome?", "tools": TOOLS} | fields
    whole: Response = await client.responses.create(**arguments)
    Response.model_validate(whole.model_dump(), strict=True)
    async with client.responses.stream(**arguments) as stream:
        async for event in stream:
            if event.type not in ("response.output_text.done", "response.completed"):  # the client's own classes
                EVENTS.validate_python(event.model_dump(exclude={"snapshot"}), strict=True)
    assert event.type in ("response.completed", "response.incomplete")
    assert simplified(event.response) == simplified(whole)
    return whole


def simplified(response: Response) -> list[tuple[str, str]]:
    """Each item's type and text."""
    return [(item.type, _text(item.to_dict())) for item in response.output]


def _text(item: dict[str, Any]) -> str:
    if item["type"] == "function_call":
        return f"{item['name']} {item['arguments']}"
    return "".join(part["text"] for part in item["content"])


async def test_text_calls_and_reasoning_are_items(engine: FakeEngine, client: AsyncOpenAI) -> None:
    says(engine, f"<think>Look it up.</think>\n\nOne moment.\n{CALL}\n{TIME}")
    response = await both(client)
    assert simplified(response) == [
        ("reasoning", "Look it up."),
        ("message", "One moment."),
        ("function_call", 'get_weather {"city": "Rome"}'),
        ("function_call", "get_time {}"),
    ]
    assert response.status == "completed"
    assert [tool.to_dict()["name"] for tool in response.tools] == ["get_weather", "get_time"]
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 0


async def test_reasoning_can_be_left_out_of_the_answer(engine: FakeEngine, client: AsyncOpenAI) -> None:
    says(engine, "<think>Look it up.</think>\n\nWarm.")
    response = await client.responses.create(model="fake", input="Hi", extra_body={"include_reasoning": False})
    assert simplified(response) == [("message", "Warm.")]


async def test_the_log_probabilities_of_reasoning_are_left_out(engine: FakeEngine, client: AsyncOpenAI) -> None:
    says(engine, "<think>Look it up.</think>\n\nWarm.")
    response = await client.responses.create(model="fake", input="Hi", include=["message.output_text.logprobs"])
    (message,) = [item.to_dict() for item in response.output if item.type == "message"]
    content: Any = message["content"]
    text = "".join(entry["token"] for entry in content[0]["logprobs"])
    assert text.removesuffix("<eos>").strip() == "Warm."


async def test_one_call_at_a_time(engine: FakeEngine, client: AsyncOpenAI) -> None:
    says(engine, f"{CALL}\n{TIME}")
    assert len((await both(client, parallel_tool_calls=False)).output) == 1


async def test_a_call_that_is_cut_off_is_incomplete(engine: FakeEngine, client: AsyncOpenAI) -> None:
    says(engine, CALL)
    response = await both(client, max_output_tokens=len(TOKENIZER.encode(CALL).ids) - 6)
    assert (response.status, response.output[0].to_dict()["status"]) == ("incomplete", "incomplete")


@pytest.mark.parametrize("stored", [True, False])
async def test_the_result_of_a_call_is_in_the_next_prompt(
    engine: FakeEngine, client: AsyncOpenAI, stored: bool
) -> None:
    says(engine, f"<think>Look it up.</think>\n\n{CALL}")
    first = await client.responses.create(model="fake", input="The weather?", tools=TOOLS, store=stored)
    call = first.output[-1]
    assert call.type == "function_call"
    says(engine, "It rains.")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "heavy rain"}
    if stored:
        answer = await both(client, input=[result], previous_response_id=first.id)
    else:
        items: Any = [{"role": "user", "content": "The weather?"}, *(item.to_dict() for item in first.output), result]
        answer = await both(client, input=items)
    text = prompt_text(engine.requests[-1])
    assert text.count('{"name": "get_weather", "arguments": {"city": "Rome"}}') == 1
    assert text.count("<|im_start|>assistant") == 2  # the call, and the answer
    assert "heavy rain" in text
    assert answer.output_text == "It rains."


async def test_only_allowed_tools_may_be_called(engine: FakeEngine, client: AsyncOpenAI) -> None:
    says(engine, TIME)
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}
    response = await both(client, tool_choice=allowed)
    assert "get_weather" not in prompt_text(engine.requests[-1])
    assert json.loads(response.model_dump_json())["tool_choice"] == allowed
    named = await both(client, tool_choice={"type": "function", "name": "get_time"})
    assert simplified(named) == [("function_call", "get_time {}")]
    assert (await both(client, tool_choice="none", input="Hi")).tools


@pytest.mark.parametrize("choice", ["auto", {"type": "function", "name": "get_weather"}])
async def test_a_function_of_a_namespace_is_called_by_both_names(
    engine: FakeEngine, client: AsyncOpenAI, choice: Any
) -> None:
    says(engine, CALL.replace("get_weather", "sky__get_weather"))
    tools: Any = [{"type": "namespace", "name": "sky", "description": "", "tools": TOOLS[:1]}, TOOLS[1]]
    call = (await both(client, tools=tools, tool_choice=choice)).output[0]
    assert call.type == "function_call"
    assert (call.namespace, call.name, json.loads(call.arguments)) == ("sky", "get_weather", {"city": "Rome"})
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "heavy rain"}
    says(engine, "It rains.")
    await both(client, input=[call.to_dict(), result], tools=tools, tool_choice="none")
    assert '{"name": "sky__get_weather", "arguments": {"city": "Rome"}}' in prompt_text(engine.requests[-1])


async def test_an_effort_switches_reasoning(engine: FakeEngine, client: AsyncOpenAI) -> None:
    says(engine, "Look it up.</think>\n\nWarm.")
    thinking = await client.responses.create(model="fake", input="Hi", reasoning={"effort": "low"})
    assert prompt_text(engine.requests[-1]).endswith("<think>\n")
    says(engine, "Warm.")
    brief = await client.responses.create(model="fake", input="Hi", reasoning={"effort": "none", "summary": "auto"})
    assert prompt_text(engine.requests[-1]).endswith("</think>\n\n")
    assert simplified(thinking) == [("reasoning", "Look it up."), ("message", "Warm.")]
    assert simplified(brief) == [("message", "Warm.")]
    assert brief.reasoning is not None
    assert (brief.reasoning.effort, brief.reasoning.summary) == ("none", "auto")
