"""Bodies of the Messages API as conversations."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from proa.template_rules import TEXT, messages_as_read
from proa_gateway.apis.messages.job import conversation_of, generation_request
from proa_gateway.apis.messages.protocol import MessagesRequest
from proa_gateway.parsing.format import NamedTool
from proa_gateway.serving.chat_prompt import template_messages
from proa_gateway.serving.content import ImagePart

TOOL = {"name": "weather", "description": "The weather.", "input_schema": {"type": "object", "properties": {}}}


def body(**fields: Any) -> MessagesRequest:
    messages = [{"role": "user", "content": "Hi"}]
    return MessagesRequest.model_validate({"model": "m", "max_tokens": 5, "messages": messages, **fields})


def history(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    sent = conversation_of(body(messages=messages, **fields)).messages
    return messages_as_read(template_messages(sent), {"user": TEXT})


BLOCKS = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]


@pytest.mark.parametrize("system", ["Be brief.\nBe kind.", BLOCKS])
def test_system_texts_are_the_first_message(system: object) -> None:
    first, user = history({"role": "user", "content": "Hi"}, system=system)
    assert first == {"role": "system", "content": "Be brief.\nBe kind."}
    assert user == {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("system", "texts"),
    [
        ([{"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=0a1b2;"}, *BLOCKS], BLOCKS),
        ([{"type": "text", "text": "x-anthropic-billing-header: cch=1"}], []),
        ("x-anthropic-billing-header: cch=1;\n\nBe brief.", BLOCKS[:1]),
        ([BLOCKS[0], {"type": "text", "text": "x-anthropic-billing-header: x"}], None),
    ],
)
def test_the_line_about_billing_before_the_system_prompt_is_left_out(
    system: Any, texts: list[dict[str, str]] | None
) -> None:
    prompts = [message["content"] for message in history({"role": "user", "content": "Hi"}, system=system)]
    expected = system if texts is None else texts
    assert prompts == [*filter(None, ["\n".join(block["text"] for block in expected)]), "Hi"]


def test_documents_with_a_text_are_texts() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "It rains."}
    document = {"type": "document", "source": source, "title": "Weather", "citations": {"enabled": True}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{**document, "context": "Today"}]}
    text = {"type": "text", "text": "Sum up."}
    tool, user = history({"role": "user", "content": [document, text, result]})
    assert (tool["content"], user["content"]) == ("Weather\nToday\nIt rains.", "Weather\nIt rains.\nSum up.")


def test_results_of_calls_come_before_the_text_beside_them() -> None:
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Köln"}}
    thought = {"type": "thinking", "thinking": "Look it up.", "signature": "x"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "rain"}]}
    messages = history(
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "One moment."}, call]},
        {"role": "user", "content": [{"type": "text", "text": "And now?"}, result]},
    )
    assistant, tool, user = messages[1:]
    assert assistant["content"] == "One moment."
    assert assistant["reasoning_content"] == "Look it up."
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"city": "Köln"}
    assert tool == {"role": "tool", "tool_call_id": "a", "name": "weather", "content": "rain"}
    assert user == {"role": "user", "content": "And now?"}


def test_images_stand_among_the_texts_and_after_the_results_of_calls() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    fetched = {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}, "cache_control": None}
    text = {"type": "text", "text": "Look."}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text, fetched]}
    messages = [{"role": "user", "content": [image, text, result]}]
    tool, results, user = conversation_of(body(messages=messages)).messages
    assert tool.content == "Look."
    assert (results.role, results.content) == (
        "user",
        [ImagePart("https://a/b.png", "messages[0].content[2].content[1].source")],
    )
    assert user.content == [ImagePart("data:image/png;base64,AAAA", "messages[0].content[0].source"), text]


def test_the_model_is_told_that_a_call_failed() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": "no such city", "is_error": True}
    assert history({"role": "user", "content": [result]})[0]["content"] == "Error: no such city"


def test_a_last_message_of_the_assistant_is_continued() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}]
    conversation = conversation_of(body(messages=messages))
    assert conversation.continues_message
    assert not conversation.opens_message


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, NamedTool("weather")),
    ],
)
def test_tool_choices(choice: dict[str, Any], expected: object) -> None:
    conversation = conversation_of(body(tools=[TOOL], tool_choice=choice))
    assert conversation.tool_choice == expected
    assert conversation.parallel_tool_calls
    function = {"name": "weather", "description": "The weather.", "parameters": TOOL["input_schema"]}
    assert [tool.for_template() for tool in conversation.tools] == [{"type": "function", "function": function}]


def test_parallel_calls_can_be_disabled() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert not conversation_of(body(tools=[TOOL], tool_choice=choice)).parallel_tool_calls


@pytest.mark.parametrize(("kind", "on"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_thinking_is_on_unless_it_is_disabled(kind: str, on: bool) -> None:
    thinking = body(thinking={"type": kind, "budget_tokens": 1024}).thinking
    assert thinking is not None
    assert thinking.is_on == on


def test_parameters_have_the_names_of_openai() -> None:
    schema = {"type": "object"}
    request = generation_request(
        body(
            temperature=0.5,
            top_k=3,
            stop_sequences=["END"],
            output_config={"format": {"type": "json_schema", "schema": schema}},
        )
    )
    assert (request.max_tokens, request.temperature, request.top_k, request.stop) == (5, 0.5, 3, ["END"])
    assert request.response_format is not None
    assert request.response_format.json_schema is not None
    assert json.loads(request.response_format.json_schema.schema_) == schema
    assert request.response_format.json_schema.strict


@pytest.mark.parametrize(
    ("fields", "where", "words"),
    [
        ({"max_tokens": 0}, ("max_tokens",), "greater than or equal to 1"),
        ({"messages": []}, ("messages",), "at least 1"),
        ({"messages": [{"role": "user", "content": [{"type": "search_result"}]}]}, None, "'search_result'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
            None,
            "'base64': only text are supported",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]}, None, "'file'"),
        ({"messages": [{"role": "user", "content": [{"text": "Hi"}]}]}, None, "an object with a type"),
        ({"tools": [{"type": 5, "name": "web_search"}]}, None, "must be an object with a type"),
        ({"tool_choice": {"type": "tool"}}, ("tool_choice",), "must have a name"),
    ],
)
def test_one_error_names_what_is_wrong(fields: dict[str, Any], where: tuple[str, ...] | None, words: str) -> None:
    with pytest.raises(ValidationError) as raised:
        body(**fields)
    (error,) = raised.value.errors()
    assert words in error["msg"]
    if where is not None:
        assert error["loc"] == where
