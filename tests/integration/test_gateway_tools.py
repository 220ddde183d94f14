"""Tools and reasoning of chats, with OpenAI's client. The model's output is scripted, in the hermes format."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from proa_gateway.apis.chat.protocol import ChatCompletion, ChatCompletionChunk
from proa_gateway.serving.tools.described import UNKNOWN
from support.chat import tool_tokenizer, tool_tokenizer_files
from support.fake_engine import EOS, FakeEngine, Reply
from support.gateway import RunningGateway, running_gateway
from support.scripted_turns import prompt_text, says

TOKENIZER = tool_tokenizer()
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
NO_SCHEMA = {"type": "object", "properties": {"a": {"type": "float"}}}
USER = [{"role": "user", "content": "What is <think> in Rome?"}]
ROME = '{"city": "Rome"}'
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NIGHT = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'

WITHOUT_REASONING = "{{ tools }}{% for message in messages %}{{ message.content }}{% endfor %}"
LIST_OF_CALLS = """{{ tools }}{# <tool_call> "arguments" #}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- if message.tool_calls %}<calls>[
{%- for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}]</calls>{% endif %}
{% endfor %}"""


def files_of(chat_template: str) -> dict[str, bytes]:
    return tool_tokenizer_files() | {"tokenizer_config.json": json.dumps({"chat_template": chat_template}).encode()}


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(files=tool_tokenizer_files()) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: FakeEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine) as gateway:
        yield gateway


async def whole(gateway: RunningGateway, **fields: Any) -> Any:
    return await gateway.openai.chat.completions.create(
        model="fake", **{"messages": USER, "tools": [WEATHER, TIME]} | fields
    )


async def streamed(gateway: RunningGateway, **fields: Any) -> Any:
    """The completion that the client's own helper assembles from the stream."""
    arguments: Any = {"messages": USER, "tools": [WEATHER, TIME]} | fields
    async with gateway.openai.chat.completions.stream(model="fake", **arguments) as stream:
        async for _ in stream:
            pass
        return await stream.get_final_completion()


def simplified(completion: Any) -> dict[str, Any]:
    choice = completion.choices[0]
    calls = [(call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    assert len({call.id for call in choice.message.tool_calls or []}) == len(calls)
    return {
        "content": choice.message.content or None,
        "reasoning": getattr(choice.message, "reasoning_content", None),
        "calls": calls,
        "finish": choice.finish_reason,
    }


def message(
    content: str | None, *calls: tuple[str, str], reasoning: str | None = None, finish: str = "stop"
) -> dict[str, Any]:
    return {
        "content": content,
        "reasoning": reasoning,
        "calls": [("function", *call) for call in calls],
        "finish": finish,
    }


TRANSCRIPTS = {
    "text": ("It is warm.", message("It is warm.")),
    "call": (CALL, message(None, ("get_weather", ROME), finish="tool_calls")),
    "text, then calls": (
        f"Let me look.\n{CALL}\n{NIGHT}",
        message("Let me look.", ("get_weather", ROME), ("get_time", "{}"), finish="tool_calls"),
    ),
    "reasoning": ("<think>\nHm, Rome.\n</think>\n\nWarm.", message("Warm.", reasoning="\nHm, Rome.\n")),
    "reasoning, then a call": (
        f"<think>\nHm.\n</think>\n\n{CALL}",
        message(None, ("get_weather", ROME), reasoning="\nHm.\n", finish="tool_calls"),
    ),
    "a call within reasoning": (
        f"<think>\nHm.\n{CALL}",
        message(None, ("get_weather", ROME), reasoning="\nHm.", finish="tool_calls"),
    ),
    "reasoning that opens and closes twice": (
        "<think><think>Hm.</think></think>Warm.",
        message("Warm.", reasoning="Hm."),
    ),
    "reasoning that does not end": ("<think>\nHm", message(None, reasoning="\nHm")),
}


@pytest.mark.parametrize("name", TRANSCRIPTS)
async def test_the_client_gets_the_same_message_streamed_and_whole(
    gateway: RunningGateway, engine: FakeEngine, name: str
) -> None:
    text, expected = TRANSCRIPTS[name]
    says(engine, text)
    for completion in (await whole(gateway), await streamed(gateway)):
        found = simplified(completion)
        for each in (found, expected):
            each["reasoning"] = (each["reasoning"] or "").strip()
        assert found == expected


async def test_content_is_null_only_beside_calls(gateway: RunningGateway, engine: FakeEngine) -> None:
    for text, content in (("", ""), ("<think>Hm.</think>", ""), ("<think>Hm.", ""), (CALL, None)):
        says(engine, text)
        assert (await whole(gateway)).choices[0].message.content == content


async def test_the_chunks_of_a_call_have_the_form_of_openai(gateway: RunningGateway, engine: FakeEngine) -> None:
    says(engine, CALL)
    body = {"model": "fake", "messages": USER, "tools": [WEATHER]}
    events = await gateway.events("/v1/chat/completions", body)
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas[0] == {"role": "assistant", "content": "", "reasoning_content": None}
    (first,) = deltas[1]["tool_calls"]
    assert first == {
        "index": 0,
        "id": first["id"],
        "type": "function",
        "function": {"name": "get_weather", "arguments": ""},
    }
    parts = [delta["tool_calls"][0] for delta in deltas[2:] if "tool_calls" in delta]
    assert all(part.keys() == {"index", "function"} and part["function"].keys() == {"arguments"} for part in parts)
    assert len(parts) > 2
    assert "".join(part["function"]["arguments"] for part in parts) == ROME
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"


async def test_bodies_and_events_match_the_documented_schema(gateway: RunningGateway, engine: FakeEngine) -> None:
    says(engine, f"<think>one</think>two {CALL}")
    body = {"model": "fake", "messages": USER, "tools": [WEATHER]}
    ChatCompletion.model_validate((await gateway.http.post("/v1/chat/completions", json=body)).json(), strict=True)
    for event in (await gateway.events("/v1/chat/completions", body))[:-1]:
        ChatCompletionChunk.model_validate(event, strict=True)


async def test_reasoning_has_two_names_and_is_counted(gateway: RunningGateway, engine: FakeEngine) -> None:
    says(engine, "<think>one two</think>three")
    num_tokens = len(TOKENIZER.encode("one two").ids)
    options = {"stream_options": {"include_usage": True}, "stream": True}
    chunks = [chunk async for chunk in await whole(gateway, **options)]
    shown = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(getattr(delta, name, None) or "" for delta in shown) == "one two"
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == num_tokens
    answer = await whole(gateway)
    assert answer.choices[0].message.reasoning == answer.choices[0].message.reasoning_content == "one two"
    assert answer.usage.completion_tokens_details.reasoning_tokens == num_tokens
    assert answer.usage.completion_tokens == len(TOKENIZER.encode("<think>one two</think>three").ids) + 1


async def test_every_delta_of_a_model_that_reasons_has_reasoning_content(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    says(engine, f"<think>one two</think>three {CALL}")
    deltas = [chunk.choices[0].delta async for chunk in await whole(gateway, stream=True)]
    assert "".join(delta.reasoning_content or "" for delta in deltas) == "one two"
    joined = await whole(gateway, stream=True, tools=[], extra_body={"separate_reasoning": False})
    assert {chunk.choices[0].delta.reasoning_content async for chunk in joined} == {None}
    hidden = await whole(gateway, stream=True, extra_body={"include_reasoning": False})
    shown = [chunk.choices[0].delta async for chunk in hidden]
    assert not any(hasattr(delta, "reasoning_content") for delta in shown)


async def test_reasoning_is_parsed_without_tools_and_hidden_on_request(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    says(engine, "<think>one</think>two")
    found = simplified(await whole(gateway, tools=[]))
    assert (found["content"], found["reasoning"]) == ("two", "one")
    for ask in (whole, streamed):
        found = simplified(await ask(gateway, extra_body={"include_reasoning": False}))
        assert (found["content"], found["reasoning"]) == ("two", None)
    found = simplified(await whole(gateway, tools=[], extra_body={"separate_reasoning": False}))
    assert (found["content"], found["reasoning"]) == ("<think>one</think>two", None)


async def test_where_the_prompt_leaves_the_reasoning_decides_what_the_output_begins_with(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    says(engine, "one</think>two")
    found = simplified(await whole(gateway, extra_body={"chat_template_kwargs": {"enable_thinking": True}}))
    assert (found["content"], found["reasoning"]) == ("two", "one")
    says(engine, "one two")
    found = simplified(await whole(gateway, reasoning_effort="none"))
    assert (found["content"], found["reasoning"]) == ("one two", None)
    assert prompt_text(engine.requests[-1]).endswith("</think>\n\n")
    assert (await gateway.http.get("/v1/models")).json()["data"][0]["thinking_switch"] == "enable_thinking"


async def test_a_call_s_opening_in_ordinary_tokens_is_text(gateway: RunningGateway, engine: FakeEngine) -> None:
    ids = [id for character in CALL for id in TOKENIZER.encode(character).ids]
    engine.script = lambda request: Reply([*ids, EOS])
    assert simplified(await whole(gateway)) == simplified(await streamed(gateway)) == message(CALL)


async def test_a_truncated_call_keeps_its_arguments_and_the_finish_reason(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    says(engine, CALL)
    num_tokens = len(TOKENIZER.encode(CALL.split("ome")[0]).ids)
    expected = message(None, ("get_weather", '{"city": "R'), finish="length")
    assert simplified(await whole(gateway, max_tokens=num_tokens)) == expected
    chunks = [chunk.choices[0] async for chunk in await whole(gateway, max_tokens=num_tokens, stream=True)]
    assert chunks[-1].finish_reason == "length"


async def test_a_named_tool_ends_with_stop(gateway: RunningGateway, engine: FakeEngine) -> None:
    says(engine, CALL)
    named = {"type": "function", "function": {"name": "get_weather"}}
    for ask in (whole, streamed):
        assert simplified(await ask(gateway, tool_choice=named)) == message(None, ("get_weather", ROME))


async def test_without_parallel_calls_only_the_first_is_given(gateway: RunningGateway, engine: FakeEngine) -> None:
    says(engine, f"{CALL}\n{NIGHT}")
    for ask in (whole, streamed):
        found = simplified(await ask(gateway, parallel_tool_calls=False))
        assert found == message(None, ("get_weather", ROME), finish="tool_calls")


async def test_without_parallel_calls_nothing_is_generated_after_the_first(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    says(engine, CALL + NIGHT * 50)
    engine.step_delay = 0.01
    answer = await whole(gateway, parallel_tool_calls=False)
    assert answer.choices[0].finish_reason == "tool_calls"
    await engine.until(lambda engine: engine.aborted == [engine.requests[-1].request_id])
    assert answer.usage.completion_tokens <= len(TOKENIZER.encode(CALL).ids)


async def test_tool_choice_none_leaves_tools_out_and_parses_no_calls(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    says(engine, CALL)
    found = simplified(await whole(gateway, tool_choice="none"))
    assert found["calls"] == []
    assert "get_weather" in found["content"]
    assert "The weather" not in prompt_text(engine.requests[-1])


async def test_only_allowed_tools_may_be_called(gateway: RunningGateway, engine: FakeEngine) -> None:
    says(engine, CALL)
    choice: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
    for ask in (whole, streamed):
        found = simplified(await ask(gateway, tool_choice={"type": "allowed_tools", "allowed_tools": choice}))
        assert found == message(None, ("get_weather", ROME), finish="tool_calls")
        prompt = prompt_text(engine.requests[-1])
        assert "get_weather" in prompt
        assert "get_time" not in prompt
        assert engine.requests[-1].sampling_params.HasField("grammar")


async def test_an_allowed_tool_that_is_not_there_is_refused(gateway: RunningGateway) -> None:
    choice: Any = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_news"}}]}
    with pytest.raises(openai.BadRequestError, match="'get_news', which is not in tools") as refusal:
        await whole(gateway, tool_choice={"type": "allowed_tools", "allowed_tools": choice})
    assert refusal.value.param == "tool_choice"


async def test_each_choice_has_its_own_calls(gateway: RunningGateway, engine: FakeEngine) -> None:
    says(engine, f"{CALL}\n{NIGHT}")
    answer = await whole(gateway, n=3)
    for choice in answer.choices:
        assert [call.function.name for call in choice.message.tool_calls] == ["get_weather", "get_time"]
    ids = {call.id for choice in answer.choices for call in choice.message.tool_calls}
    assert len(ids) == 6


async def test_token_ids_and_log_probabilities_are_complete(gateway: RunningGateway, engine: FakeEngine) -> None:
    text = f"<think>one</think>two {CALL}"
    says(engine, text)
    expected = [*TOKENIZER.encode(text).ids, EOS]
    fields: dict[str, Any] = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    choice = (await whole(gateway, **fields)).choices[0]
    assert choice.token_ids == expected
    assert len(choice.logprobs.content) == len(expected)
    chunks = [chunk.choices[0] async for chunk in await whole(gateway, stream=True, **fields)]
    assert [id for chunk in chunks for id in chunk.token_ids or []] == expected
    assert sum(len(chunk.logprobs.content) for chunk in chunks if chunk.logprobs) == len(expected)
    assert all(chunk.logprobs.content for chunk in chunks if chunk.logprobs)  # null where there are no tokens


async def test_a_result_goes_back_into_the_prompt(gateway: RunningGateway, engine: FakeEngine) -> None:
    says(engine, f"Hm. {CALL}")
    first = (await whole(gateway)).choices[0].message
    says(engine, "Warm.")
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "23 °C"}
    answer = await whole(gateway, messages=[*USER, first, result])
    assert answer.choices[0].message.content == "Warm."
    prompt = prompt_text(engine.requests[-1])
    assert f"assistant\nHm.\n{CALL}<|im_end|>" in prompt
    assert "<tool_response>\n23 °C\n</tool_response>" in prompt


async def test_the_tokens_of_a_chat_include_its_tools(gateway: RunningGateway, engine: FakeEngine) -> None:
    says(engine, "Hm.")
    usage = (await whole(gateway)).usage
    body = {"messages": USER, "tools": [WEATHER, TIME]}
    counted = (await gateway.http.post("/tokenize", json=body)).json()
    assert counted["count"] == usage.prompt_tokens
    without = (await gateway.http.post("/tokenize", json={"messages": USER})).json()
    assert without["count"] < usage.prompt_tokens


def grammar_of(engine: FakeEngine) -> Any:
    params = engine.requests[-1].sampling_params
    return params.grammar if params.HasField("grammar") else None


STRICT = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
OPEN, CLOSE, CALL_ID = (TOKENIZER.token_to_id(text) for text in ("<think>", "</think>", "<tool_call>"))
JSON_ANSWER = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("fields", "start_after", "free_if_first", "repeats"),
    [
        ({"tool_choice": "required"}, [CLOSE], [OPEN], False),
        ({"tool_choice": {"type": "function", "function": {"name": "get_time"}}}, [CLOSE], [OPEN], False),
        ({"tool_choice": "required", "reasoning_effort": "none"}, [], [], False),
        (
            {"tool_choice": "required", "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
            [CLOSE],
            [],
            False,
        ),
        ({"tools": [STRICT]}, [CALL_ID], [], True),
        (JSON_ANSWER, [CLOSE], [OPEN], False),
        ({"tools": [], **JSON_ANSWER}, [CLOSE], [OPEN], False),
        ({"tools": [], "reasoning_effort": "none", **JSON_ANSWER}, [], [], False),
        ({"extra_body": {"thinking_token_budget": 7}}, [OPEN], [], True),
        (
            {"extra_body": {"thinking_token_budget": 0, "chat_template_kwargs": {"enable_thinking": True}}},
            [OPEN],
            [OPEN],
            True,
        ),
    ],
)
async def test_the_grammar_begins_where_the_reasoning_ends(
    gateway: RunningGateway,
    engine: FakeEngine,
    fields: dict[str, Any],
    start_after: list[int],
    free_if_first: list[int],
    repeats: bool,
) -> None:
    says(engine, "one")
    await whole(gateway, **fields)
    grammar = grammar_of(engine)
    assert (list(grammar.start_after), list(grammar.free_if_first), grammar.repeats) == (
        start_after,
        free_if_first,
        repeats,
    )


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"tools": [STRICT]}, {"tools": [], **JSON_ANSWER}])
async def test_a_budget_of_reasoning_and_constraints_are_one_grammar(
    gateway: RunningGateway, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    says(engine, "one")
    await whole(gateway, extra_body={"thinking_token_budget": 7}, **fields)
    grammar = grammar_of(engine)
    assert f"(<[{OPEN}]>" in grammar.text
    assert "[max_tokens=7]" in grammar.text
    assert not grammar.start_after
    await whole(gateway, extra_body={"thinking_token_budget": 7}, reasoning_effort="none", **fields)
    assert "max_tokens" not in grammar_of(engine).text, "the prompt has closed it"


@pytest.mark.parametrize(
    "fields", [{"thinking_token_budget": -1}, {"thinking_token_budget": 5, "reasoning_effort": "none"}]
)
async def test_a_budget_without_reasoning_or_without_bound_constrains_nothing(
    gateway: RunningGateway, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    says(engine, "one")
    await whole(gateway, tools=[], extra_body=fields)
    assert grammar_of(engine) is None


async def test_auto_without_a_strict_tool_is_not_constrained(gateway: RunningGateway, engine: FakeEngine) -> None:
    says(engine, "one")
    await whole(gateway)
    assert grammar_of(engine) is None


async def test_a_named_tool_alone_is_in_the_grammar(gateway: RunningGateway, engine: FakeEngine) -> None:
    says(engine, "one")
    await whole(gateway, tool_choice={"type": "function", "function": {"name": "get_time"}})
    assert "get_time" in grammar_of(engine).text
    assert "get_weather" not in grammar_of(engine).text


async def test_a_strict_tool_whose_schema_cannot_be_held_is_refused(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    parameters = {"type": "object", "properties": {"a": {"not": {"minLength": 1}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    answer = await gateway.chat(tools=[tool])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert "tool 'f' with strict: $.a: not is not supported" in answer.json()["error"]["message"]
    assert (await gateway.chat(tools=[tool], tool_choice="none")).status_code == 200


@pytest.mark.parametrize(
    ("path", "tool", "fields"),
    [
        ("/v1/chat/completions", {"function": {"name": "f", "parameters": NO_SCHEMA}}, {"messages": USER}),
        ("/v1/responses", {"name": "f", "parameters": NO_SCHEMA}, {"input": USER}),
        ("/v1/messages", {"name": "f", "input_schema": NO_SCHEMA}, {"messages": USER, "max_tokens": 9}),
    ],
)
async def test_parameters_that_are_no_schema_are_refused_where_a_call_is_demanded(
    gateway: RunningGateway, path: str, tool: dict[str, Any], fields: dict[str, Any]
) -> None:
    is_messages = path == "/v1/messages"
    tools = [tool if is_messages else {"type": "function", **tool}]

    async def answer(choice: str) -> Any:
        body = {"model": "fake", "tools": tools, "tool_choice": {"type": choice} if is_messages else choice, **fields}
        return await gateway.http.post(path, json=body)

    refused = await answer("any" if is_messages else "required")
    assert refused.status_code == 400
    assert "tool 'f' has an invalid 'parameters' schema: $.a: type 'float' is" in refused.json()["error"]["message"]
    assert (await answer("auto")).status_code == 200


async def test_a_header_names_tools_whose_schemas_are_not_held(gateway: RunningGateway, engine: FakeEngine) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}, STRICT]
    says(engine, CALL)

    async def warnings(choice: str) -> Any:
        response = await gateway.chat(tools=tools, tool_choice=choice)
        assert response.status_code == 200
        return response.headers.get("x-proa-warnings")

    named = "tools: tool 'f': $.a: uniqueItems is not enforced"
    assert [await warnings(choice) for choice in ("required", "auto", "none")] == [named, named, None]


@pytest.mark.parametrize("before", ["", "<think>one</think>"])
async def test_whitespace_before_a_constrained_answer_is_no_content(
    gateway: RunningGateway, engine: FakeEngine, before: str
) -> None:
    says(engine, f"{before}\n\nyes")
    fields: dict[str, Any] = {"tools": [], "extra_body": {"structured_outputs": {"choice": ["yes"]}}}
    assert simplified(await whole(gateway, **fields))["content"] == "yes"
    assert simplified(await streamed(gateway, **fields))["content"] == "yes"


async def test_the_formats_are_chosen_by_the_flags(engine: FakeEngine) -> None:
    says(engine, f"<think>one</think>two {CALL}")
    async with running_gateway(engine, tool_call_parser="pythonic", reasoning_parser="mistral") as gateway:
        found = simplified(await whole(gateway))
        assert (found["reasoning"], found["calls"]) == (None, [])
        assert (await whole(gateway)).usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "deepseek_v3", "mistral"])
async def test_without_reasoning_in_the_template_an_answer_is_constrained_from_its_first_token(name: str) -> None:
    async with (
        FakeEngine(files=files_of(WITHOUT_REASONING)) as engine,
        running_gateway(engine, tool_call_parser=name) as gateway,
    ):
        says(engine, "yes")
        for tools in ([], [WEATHER]):
            await whole(gateway, tools=tools, extra_body={"structured_outputs": {"choice": ["yes"]}})
            made = grammar_of(engine)
            assert (made.start_after, made.free_if_first) == ([], [])


async def test_an_answer_in_channels_is_constrained_from_its_first_token() -> None:
    """Whatever the template has, since the format says what each message is."""
    async with (
        FakeEngine(files=files_of(WITHOUT_REASONING)) as engine,
        running_gateway(engine, tool_call_parser="harmony") as gateway,
    ):
        says(engine, "yes")
        await whole(gateway, tools=[], extra_body={"structured_outputs": {"choice": ["yes"]}})
        assert (grammar_of(engine).start_after, grammar_of(engine).free_if_first) == ([], [])
        assert "analysis" in grammar_of(engine).text


@pytest.mark.parametrize("parser", [None, "hermes"])
async def test_without_a_reasoning_parser_reasoning_is_content(engine: FakeEngine, parser: str | None) -> None:
    async with running_gateway(engine, tool_call_parser=parser, reasoning_parser="none") as gateway:
        says(engine, f"<think>one</think>two {CALL}")
        found = simplified(await whole(gateway))
        assert (found["content"], found["reasoning"]) == ("<think>one</think>two", None)
        assert found["calls"] == [("function", "get_weather", ROME)]
        await whole(gateway, extra_body={"structured_outputs": {"choice": ["yes"]}}, tools=[])
        assert grammar_of(engine).free_if_first == []


async def test_without_reasoning_and_a_format_of_calls_nothing_is_parsed() -> None:
    async with (
        FakeEngine(files=files_of("{{ messages[0].content }}{{ tools }}")) as engine,
        running_gateway(engine, reasoning_parser="none") as gateway,
    ):
        says(engine, "<think>one</think>two")
        assert simplified(await whole(gateway, tools=[]))["content"] == "<think>one</think>two"


async def test_a_format_that_does_not_read_the_templates_calls_is_in_the_log_and_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The template has the signs of `hermes`, and writes a list of calls in another tag."""
    warning = "the chat template of fake writes calls that the format hermes does not read"
    async with FakeEngine(files=files_of(LIST_OF_CALLS)) as engine:
        async with running_gateway(engine) as gateway:
            assert caplog.messages.count(warning) == 1
            assert (await gateway.chat(tools=[WEATHER])).headers["x-proa-warnings"] == UNKNOWN
        async with running_gateway(engine, tool_call_parser="hermes") as gateway:
            assert caplog.messages.count(warning) == 2
            says(engine, CALL)
            assert simplified(await whole(gateway))["calls"] == [("function", "get_weather", ROME)]


async def test_reasoning_is_parsed_by_its_flag_where_the_format_of_calls_is_unknown() -> None:
    async with FakeEngine(files=files_of("{{ messages[0].content }}{{ tools }}")) as engine:
        says(engine, "<think>one</think>two <tool_call>")
        async with running_gateway(engine, reasoning_parser="qwen3") as gateway:
            found = simplified(await whole(gateway, tools=[]))
            assert (found["content"], found["reasoning"]) == ("two <tool_call>", "one")
        async with running_gateway(engine) as gateway:
            found = simplified(await whole(gateway, tools=[]))
            assert (found["content"], found["reasoning"]) == ("<think>one</think>two <tool_call>", None)
