"""Responses requests as conversations."""

from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from proa_gateway.apis.responses.items import Item, listed, parsed
from proa_gateway.apis.responses.job import chat_messages, conversation_of
from proa_gateway.apis.responses.protocol import ResponsesRequest
from proa_gateway.errors import InvalidRequest
from proa_gateway.http.errors import validation_error_object
from proa_gateway.parsing.format import NamedTool
from proa_gateway.serving.content import ImagePart, Part
from proa_gateway.serving.conversation import Conversation

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OTHER_CALL = {**CALL, "call_id": "c2"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "1"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
TEXT = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]}


def request(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"input": "Hi", **fields})


def conversation(body: ResponsesRequest, history: Sequence[Item] = ()) -> Conversation:
    return conversation_of(body, history, body.functions(history))


def shape(*items: dict[str, Any]) -> list[tuple[str, str | list[Part] | None, str | None, list[str]]]:
    """Role, text, reasoning and ids of calls of each message."""
    return [
        (
            message.role,
            message.content,
            (message.model_extra or {}).get("reasoning_content"),
            [call.id for call in message.tool_calls or ()],
        )
        for message in chat_messages(request(input=list(items)).input)
    ]


def test_reasoning_text_and_calls_of_one_answer_are_one_message() -> None:
    assert shape(THOUGHT, TEXT, CALL, OTHER_CALL, RESULT) == [
        ("assistant", "Wait.", "Hm.", ["c1", "c2"]),
        ("tool", "1", None, []),
    ]


def test_another_text_or_thought_begins_another_message() -> None:
    assert shape(TEXT, TEXT) == [("assistant", "Wait.", None, [])] * 2
    assert shape(THOUGHT, CALL, THOUGHT, OTHER_CALL) == [
        ("assistant", None, "Hm.", ["c1"]),
        ("assistant", None, "Hm.", ["c2"]),
    ]
    assert shape(CALL, TEXT) == [("assistant", None, None, ["c1"]), ("assistant", "Wait.", None, [])]
    assert shape(THOUGHT, THOUGHT, TEXT) == [("assistant", "Wait.", "Hm.\nHm.", [])]


def test_a_summary_stands_for_reasoning_that_is_not_there() -> None:
    summary = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Short."}]}
    assert shape(summary) == [("assistant", None, "Short.", [])]


SKY, SEA = (
    {"type": "namespace", "name": name, "tools": [{"type": "function", "name": each} for each in ("now", name)]}
    for name in ("sky", "sea")
)
NOW = {"type": "function", "name": "now"}


@pytest.mark.parametrize(
    ("tools", "named", "chosen"),
    [
        ([SKY, SEA], "sky", "sky__sky"),
        ([SKY, SEA], "sea__now", "sea__now"),
        ([SKY, NOW], "now", "now"),
        ([SKY], "tomorrow", "tomorrow"),  # refused later
    ],
)
def test_a_function_in_a_namespace_is_chosen_by_either_name(
    tools: list[dict[str, Any]], named: str, chosen: str
) -> None:
    body = request(tools=tools, tool_choice={"type": "function", "name": named})
    assert conversation(body).tool_choice == NamedTool(chosen)


def test_a_name_of_several_functions_is_no_choice() -> None:
    with pytest.raises(InvalidRequest, match="sky__now, sea__now"):
        conversation(request(tools=[SKY, SEA], tool_choice=NOW))


def test_allowed_functions_of_namespaces() -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [NOW, {"type": "function", "name": "sky__sky"}]}
    tools = conversation(request(tools=[SKY, SEA], tool_choice=allowed)).tools
    assert [tool.function.name for tool in tools] == ["sky__now", "sky__sky", "sea__now"]


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert shape({"role": "user", "content": parts}, {**RESULT, "output": parts}) == [
        ("user", "a\nb", None, []),
        ("tool", "a\nb", None, []),
    ]


def test_listed_items_have_ids_and_are_the_same_items() -> None:
    items = request(input=[{"role": "user", "content": "Hi"}, THOUGHT, TEXT, CALL, RESULT]).input
    fields = listed(items)
    assert len({item["id"] for item in fields}) == 5
    assert listed(parsed(fields)) == fields
    assert list(chat_messages(parsed(fields))) == list(chat_messages(items))


def test_images_stand_among_the_texts_of_messages_and_results() -> None:
    image = {"type": "input_image", "image_url": "https://a/b.png", "detail": "high"}
    text = {"type": "input_text", "text": "Look."}
    messages = shape({"role": "user", "content": [text, text, image]}, CALL, {**RESULT, "output": [image]})
    assert messages[0][1] == [
        {"type": "text", "text": "Look.\nLook."},
        ImagePart("https://a/b.png", "input[0].content[2].image_url"),
    ]
    assert messages[2][1] == [ImagePart("https://a/b.png", "input[2].output[0].image_url")]


def test_errors_about_images_of_earlier_responses_name_the_previous_response() -> None:
    image = {"type": "input_image", "image_url": "data:,", "detail": None}
    history = request(input=[{"role": "user", "content": [image]}]).input
    first, second = conversation(request(input=[{"role": "user", "content": [image]}]), history).messages
    assert first.content == [ImagePart("data:,", "previous_response_id")]
    assert second.content == [ImagePart("data:,", "input[0].content[0].image_url")]


def test_only_an_unfinished_message_is_continued() -> None:
    for status, continues in (("in_progress", True), ("incomplete", True), ("completed", False)):
        body = request(input=[{**TEXT, "status": status}])
        answer = conversation(body)
        assert (answer.continues_message, answer.opens_message) == (continues, not continues)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file_1"}]}]}, "has a file_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "Field required"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": {}}]}]}, "valid string"),
        ({"input": [{"type": "computer_call"}]}, "has the type 'computer_call': only message, function_call"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "send the item itself"),
        ({"input": ["a"]}, "must be an object with a type"),
        ({"input": 5}, "must be a string or a list of items"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "'input_file': only input_text"),
        ({"tools": [{"name": "mcp"}]}, "must be an object with a type"),
        ({"tool_choice": "maybe"}, "must be"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{}]}}, "must have"),
        ({"input": "\ud800"}, "lone surrogate"),
    ],
)
def test_there_is_one_error_for_a_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        request(**fields)
    assert error.value.error_count() == 1
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("input", "param"),
    [
        ("\ud800", "input"),
        ([{"role": "user", "content": "\ud800"}], "input[0].content"),
        ([{"type": "reasoning", "summary": [{"type": "summary_text"}]}], "input[0].summary[0].text"),
        ([{"type": "function_call", "call_id": 1}], "input[0].call_id"),
    ],
)
def test_an_error_names_the_path_in_the_body(input: Any, param: str) -> None:
    with pytest.raises(ValidationError) as raised:
        request(input=input)
    errors = [error | {"loc": ("body", *error["loc"])} for error in raised.value.errors()]
    assert validation_error_object(errors, {"input": input})["error"]["param"] == param
