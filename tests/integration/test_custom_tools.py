"""Custom tools of responses and of chats, with OpenAI's client. The model's output is scripted, as hermes has it."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError
from openai.types.chat import ChatCompletion
from openai.types.responses import Response, ResponseCustomToolCall, ResponseStreamEvent
from pydantic import TypeAdapter

from proa_gateway.apis.chat import protocol
from support.chat import tool_tokenizer, tool_tokenizer_files
from support.fake_engine import FakeEngine
from support.gateway import running_gateway
from support.scripted_turns import prompt_text, says
from support.text_grammars import PATCH

TOKENIZER = tool_tokenizer()
EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
LARK = {"syntax": "lark", "definition": PATCH.grammar.definition}
TOOLS: Any = [
    {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": {"type": "grammar", **LARK}},
    {"type": "custom", "name": "run"},
    {"type": "function", "name": "get_time"},
]
CHAT_TOOLS: Any = [
    {"type": "custom", "custom": {"name": "apply_patch", "format": {"type": "grammar", "grammar": LARK}}},
    {"type": "custom", "custom": {"name": "run", "format": {"type": "text"}}},
    {"type": "function", "function": {"name": "get_time"}},
]
RUN = 'print("😀\\n")\n'
USER: Any = [{"role": "user", "content": "Do it."}]


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(files=tool_tokenizer_files()) as engine:
        yield engine


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[AsyncOpenAI]:
    async with running_gateway(engine) as gateway:
        yield gateway.openai


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def custom(name: str, text: str, *, ascii_only: bool = False) -> str:
    return call(name, json.dumps({"input": text}, ensure_ascii=ascii_only))


CALLS = f"{custom('apply_patch', PATCH.example)}\n{custom('run', RUN, ascii_only=True)}\n{call('get_time', '{}')}"


async def respond(client: AsyncOpenAI, **fields: Any) -> Response:
    """The response as a whole, whose output the events have too. Both fit the client's types."""
    arguments: Any = {"model": "fake", "input": "Do it.", "tools": TOOLS} | fields
    whole: Response = await client.responses.create(**arguments)
    Response.model_validate(whole.model_dump(), strict=True)
    texts: dict[str, str] = {}
    async with client.responses.stream(**arguments) as stream:
        async for event in stream:
            if event.type not in ("response.output_text.done", "response.completed"):  # the client's own classes
                EVENTS.validate_python(event.model_dump(exclude={"snapshot"}), strict=True)
            if event.type == "response.output_item.added" and event.item.type == "custom_tool_call":
                assert event.item.input == ""
            if event.type == "response.custom_tool_call_input.delta":
                texts[event.item_id] = texts.get(event.item_id, "") + event.delta
            if event.type == "response.custom_tool_call_input.done":
                assert texts.pop(event.item_id, "") == event.input
    assert not texts
    assert event.type in ("response.completed", "response.incomplete")
    assert [_shown(item) for item in event.response.output] == [_shown(item) for item in whole.output]
    return whole


def _shown(item: Any) -> dict[str, Any]:
    return {name: value for name, value in item.to_dict().items() if name not in ("id", "call_id", "parsed_arguments")}


async def test_a_response_has_the_calls_of_custom_tools(engine: FakeEngine, client: AsyncOpenAI) -> None:
    says(engine, CALLS)
    response = await respond(client)
    patch, run, time = response.output
    assert isinstance(patch, ResponseCustomToolCall)
    assert isinstance(run, ResponseCustomToolCall)
    assert (patch.name, patch.input) == ("apply_patch", PATCH.example)
    assert (run.name, run.input) == ("run", RUN)
    assert time.type == "function_call"
    assert patch.id is not None
    assert patch.id.startswith("ctc_")
    assert response.model_dump(exclude_unset=True)["tools"][0] == TOOLS[0]
    assert "The input must match this Lark grammar:\\nstart: begin_patch hunk+ end_patch" in prompt_text(
        engine.requests[-1]
    )


async def test_what_an_unconstrained_call_has_beside_an_input(engine: FakeEngine, client: AsyncOpenAI) -> None:
    for arguments, text in (('{"code": "a"}', '{"code": "a"}'), ("{}", ""), ('{"input": 5}', "5")):
        says(engine, call("run", arguments))
        (item,) = (await respond(client)).output
        assert isinstance(item, ResponseCustomToolCall)
        assert item.input == text


async def test_a_call_that_is_cut_off_has_the_beginning_of_its_input(engine: FakeEngine, client: AsyncOpenAI) -> None:
    written = custom("run", RUN)
    says(engine, written)
    response = await respond(client, max_output_tokens=len(TOKENIZER.encode(written).ids) - 8)
    (item,) = response.output
    assert isinstance(item, ResponseCustomToolCall)
    assert response.status == "incomplete"
    assert item.input
    assert RUN.startswith(item.input)
    assert item.to_dict()["status"] == "incomplete"


@pytest.mark.parametrize("stored", [True, False])
async def test_a_custom_call_and_its_output_are_in_the_next_prompt(
    engine: FakeEngine, client: AsyncOpenAI, stored: bool
) -> None:
    says(engine, custom("run", RUN))
    first = await client.responses.create(model="fake", input="Do it.", tools=TOOLS, store=stored)
    (item,) = first.output
    assert isinstance(item, ResponseCustomToolCall)
    says(engine, "Done.")
    output: Any = [{"type": "input_text", "text": "Script"}, {"type": "input_text", "text": "completed"}]
    result: Any = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": output}
    if stored:
        fields: Any = {"input": [result], "previous_response_id": first.id}
    else:
        fields = {"input": [{"role": "user", "content": "Do it."}, item.to_dict(), result]}
    second = await client.responses.create(model="fake", tools=TOOLS, **fields)
    assert second.output_text == "Done."
    assert custom("run", RUN) in prompt_text(engine.requests[-1])
    assert "Script\ncompleted" in prompt_text(engine.requests[-1])
    items = [entry.to_dict() async for entry in client.responses.input_items.list(second.id, order="asc")]
    assert [entry["type"] for entry in items[-2:]] == ["custom_tool_call", "custom_tool_call_output"]
    assert items[-2]["input"] == RUN


@pytest.mark.parametrize("choice", ["auto", {"type": "custom", "name": "run"}])
async def test_a_custom_tool_of_a_namespace(engine: FakeEngine, client: AsyncOpenAI, choice: Any) -> None:
    says(engine, custom("shell__run", RUN))
    tools: Any = [{"type": "namespace", "name": "shell", "description": "", "tools": TOOLS[1:]}]
    (item,) = (await respond(client, tools=tools, tool_choice=choice)).output
    assert isinstance(item, ResponseCustomToolCall)
    assert (item.namespace, item.name, item.input) == ("shell", "run", RUN)
    await respond(client, tools=tools, input=[item.to_dict()])
    assert custom("shell__run", RUN) in prompt_text(engine.requests[-1])


async def test_allowed_custom_tools(engine: FakeEngine, client: AsyncOpenAI) -> None:
    says(engine, custom("run", RUN))
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "run"}]}
    response = await respond(client, tool_choice=allowed)
    assert json.loads(response.model_dump_json())["tool_choice"] == allowed
    assert "apply_patch" not in prompt_text(engine.requests[-1])
    assert engine.requests[-1].sampling_params.grammar.text


@pytest.mark.parametrize(("choice", "is_constrained"), [("auto", True), ({"type": "custom", "name": "run"}, True)])
async def test_a_grammar_is_enforced_without_strict(
    engine: FakeEngine, client: AsyncOpenAI, choice: Any, is_constrained: bool
) -> None:
    says(engine, custom("run", RUN))
    await respond(client, tool_choice=choice)
    grammar = engine.requests[-1].sampling_params.grammar.text
    assert ("*** Begin Patch" in grammar) is (choice == "auto")
    await respond(client, tools=TOOLS[1:])
    assert not engine.requests[-1].sampling_params.HasField("grammar")


async def test_a_grammar_that_cannot_be_held_is_refused(engine: FakeEngine, client: AsyncOpenAI) -> None:
    for definition, sentence in (
        ("start: /(?=a)a/", "tools: tool 'edit': look-around is not supported in a regular expression."),
        ('start: "[" /[^;]*/ start* "]"', "a recursive grammar is not supported in this format of tool calls unless"),
    ):
        grammar = {"syntax": "lark", "definition": definition}
        tool: Any = {"type": "custom", "name": "edit", "format": {"type": "grammar", **grammar}}
        with pytest.raises(BadRequestError) as refused:
            await client.responses.create(model="fake", input="Hi", tools=[tool])
        assert sentence in refused.value.message
        chat_format = {"type": "grammar", "grammar": grammar}
        chat_tool: Any = {"type": "custom", "custom": {"name": "edit", "format": chat_format}}
        with pytest.raises(BadRequestError) as refused:
            await client.chat.completions.create(model="fake", messages=USER, tools=[chat_tool])
        assert sentence in refused.value.message


async def test_a_format_of_another_type_is_refused(client: AsyncOpenAI) -> None:
    tool: Any = {"type": "custom", "name": "edit", "format": {"type": "json"}}
    with pytest.raises(BadRequestError, match="only text, grammar are supported"):
        await client.responses.create(model="fake", input="Hi", tools=[tool])


async def test_a_chat_has_the_calls_of_custom_tools(engine: FakeEngine, client: AsyncOpenAI) -> None:
    says(engine, CALLS)
    completion: Any = await client.chat.completions.create(model="fake", messages=USER, tools=CHAT_TOOLS)
    ChatCompletion.model_validate(completion.model_dump(), strict=True)
    protocol.ChatCompletion.model_validate(completion.model_dump(exclude_unset=True))
    patch, run, time = completion.choices[0].message.tool_calls
    assert (patch.type, patch.custom.name, patch.custom.input) == ("custom", "apply_patch", PATCH.example)
    assert (run.type, run.custom.name, run.custom.input) == ("custom", "run", RUN)
    assert time.type == "function"
    assert completion.choices[0].finish_reason == "tool_calls"


async def test_a_stream_of_a_chat_has_the_inputs_as_they_come(engine: FakeEngine, client: AsyncOpenAI) -> None:
    says(engine, f"{custom('run', RUN, ascii_only=True)}\n{call('get_time', '{}')}")
    stream = await client.chat.completions.create(model="fake", messages=USER, tools=CHAT_TOOLS, stream=True)
    calls: list[Any] = []
    finish = None
    async for chunk in stream:
        protocol.ChatCompletionChunk.model_validate(chunk.model_dump(exclude_unset=True))
        finish = chunk.choices[0].finish_reason
        for part in chunk.choices[0].delta.tool_calls or []:
            calls.append(part.model_dump(exclude_unset=True))
    first, *more = [part for part in calls if part["index"] == 0]
    assert first.pop("id").startswith("call_")
    assert first == {"index": 0, "type": "custom", "custom": {"name": "run", "input": ""}}
    assert len(more) > 1
    assert all(part.keys() == {"index", "custom"} and part["custom"].keys() == {"input"} for part in more)
    assert "".join(part["custom"]["input"] for part in more) == RUN
    assert calls[len(more) + 1]["function"]["name"] == "get_time"
    assert finish == "tool_calls"


async def test_a_custom_call_in_a_chats_history(engine: FakeEngine, client: AsyncOpenAI) -> None:
    says(engine, "Done.")
    made: Any = {"id": "call_1", "type": "custom", "custom": {"name": "run", "input": RUN}}
    messages: Any = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "call_1", "content": "completed"},
    ]
    await client.chat.completions.create(model="fake", messages=messages, tools=CHAT_TOOLS)
    assert custom("run", RUN) in prompt_text(engine.requests[-1])
    messages[1]["tool_calls"] = [{"id": "call_1", "type": "custom", "custom": {"name": "run"}}]
    with pytest.raises(BadRequestError, match=r'must have "custom": \{"name": …, "input": …\}'):
        await client.chat.completions.create(model="fake", messages=messages, tools=CHAT_TOOLS)


async def test_the_choice_of_a_chats_custom_tool(engine: FakeEngine, client: AsyncOpenAI) -> None:
    says(engine, custom("run", RUN))
    run: Any = {"type": "custom", "custom": {"name": "run"}}
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [run]}}
    for choice in (run, allowed):
        completion: Any = await client.chat.completions.create(
            model="fake", messages=USER, tools=CHAT_TOOLS, tool_choice=choice
        )
        (made,) = completion.choices[0].message.tool_calls
        assert made.custom.input == RUN
        assert "*** Begin Patch" not in engine.requests[-1].sampling_params.grammar.text
