"""What formats without an opening of their own take for content, and the ids that models write."""

import pytest

from proa_gateway.parsing.compiled_format import compile_format
from proa_gateway.parsing.events import ContentDelta
from proa_gateway.parsing.format import CallObject, Json, NamedIds, PythonCall, ToolFormat
from proa_gateway.parsing.json_formats import HARMONY, HERMES, MISTRAL_V11, MISTRAL_V13
from proa_gateway.parsing.parser import ResponseParser
from support.transcripts import Transcript, check_transcript, parse

PYTHONIC = ToolFormat(
    "pythonic", (), "$name($arguments)", PythonCall(), section=("[", "]"), between=", ", at_start=True
)
OBJECTS = ToolFormat(
    "objects",
    (),
    '{"name": "$name", "parameters": $arguments}',
    CallObject("name", "parameters"),
    reasoning=("<think>", "</think>"),
    between="; ",
    also_opens=("<|python_tag|>",),
    at_start=True,
)
NAMED = ToolFormat("named", (), "<call>$id<args>$arguments</call>", Json(), call_ids=NamedIds("functions.$name:$index"))


@pytest.mark.parametrize("text", ["[1] cites", "[ ] is empty", "[ foo bar] (", "[f", "Hi [f()]", "\n\nHi", "[]"])
def test_text_that_is_no_list_of_calls_is_content(text: str) -> None:
    check_transcript(PYTHONIC, Transcript(text, content=text))


@pytest.mark.parametrize(
    "text", ['{"name": "Bob", "age": 3}', '{"a": [1]} ok', "{", '{"name": "f"', 'Hi {"name": "f", "parameters": {}}']
)
def test_text_that_is_no_object_with_name_and_parameters_is_content(text: str) -> None:
    check_transcript(OBJECTS, Transcript(text, content=text))


def test_objects_are_calls_where_the_content_begins() -> None:
    both = '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'
    calls = [("f", {"a": 1}), ("g", {})]
    check_transcript(OBJECTS, Transcript(both, calls=calls))
    check_transcript(OBJECTS, Transcript("\n " + both + "\n", calls=calls))
    check_transcript(OBJECTS, Transcript("<think>a</think>\n" + both, reasoning="a", calls=calls))
    check_transcript(OBJECTS, Transcript("Yes <|python_tag|>" + both, content="Yes", calls=calls), ["<|python_tag|>"])


def test_name_is_taken_from_the_id_that_the_model_writes() -> None:
    message = parse(NAMED, "<call>functions.a.b:7<args>{}</call>", ["<call>", "<args>", "</call>"])
    assert [(call.id, call.name) for call in message.calls] == [("functions.a.b:7", "a.b")]


@pytest.mark.parametrize("tool_format", [MISTRAL_V11, MISTRAL_V13])
def test_id_that_the_model_writes_is_the_id_of_the_call(tool_format: ToolFormat) -> None:
    tokens = ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"]
    message = parse(tool_format, '[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{"a": 1}', tokens)
    assert [(call.id, call.name, call.arguments) for call in message.calls] == [("abc123XYZ", "f", '{"a": 1}')]


def test_other_ids_are_unique() -> None:
    message = parse(PYTHONIC, "[f(), f(), f()]")
    assert len({call.id for call in message.calls}) == 3
    assert all(call.id.startswith("call_") for call in message.calls)


def test_a_header_of_a_call_has_a_limit() -> None:
    text = "<call>" + "functions." * 200 + "f:1<args>{}</call>"
    assert parse(NAMED, text, size=1).content == parse(NAMED, text).content == text


def test_a_long_output_of_openings_alone_is_one_event() -> None:
    text = '<tool_call>{"x": "' + "<tool_call>{" * 2000
    parser = ResponseParser(compile_format(HERMES, {}, calls=True), {}, reasoning_open=False)
    assert parser.text(text) + parser.finish() == [ContentDelta(text)]


CHANNEL_TOKENS = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>"]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("plain text", "plain text"),
        ("<|channel|>final<|message|>Hi", "Hi"),
        ("<|channel|>final<|message|>Hi\n<|end|><|start|>assistant<|channel|>final<|message|>, you", "Hi, you"),
        ("<|channel|>final<|message|>Hi<|channel|>final<|message|>, you", "Hi, you"),
        ("<|channel|>final<|message|>Hi<|end|><|start|>assistant<|channel|>ana", "Hi"),
        ("<|message|>Hi", "Hi"),
    ],
)
def test_content_of_channels(text: str, content: str) -> None:
    check_transcript(HARMONY, Transcript(text, content=content), CHANNEL_TOKENS)


def test_recipient_may_stand_before_the_channel() -> None:
    text = ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}'
    check_transcript(HARMONY, Transcript(text, calls=[("f", {"a": 1})]), CHANNEL_TOKENS)
