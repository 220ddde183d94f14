"""What formats without an opening of their own take for content, and the ids that models write."""

import pytest

from proa_gateway.parsing.compiled_format import compile_format
from proa_gateway.parsing.events import ContentDelta
from proa_gateway.parsing.format import CallObject, Json, NamedIds, PythonCall, ToolFormat
from proa_gateway.parsing.json_formats import HARMONY, HERMES, MISTRAL_V11, MISTRAL_V13
from proa_gateway.parsing.parser import ResponseParser
from proa_gateway.parsing.tagged_formats import MUSE_GLIMMER
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


RECIPIENT_TOKENS = ["<|start|>", "<|message|>", "<|eom|>", "<|eot|>"]
INVOKE = '<atem:invoke name="f">\n<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>'
CALL = f" to=f<|message|><atem:function_calls>\n{INVOKE}\n</atem:function_calls>"


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (" to=user<|message|>Hi.<|eot|>", "", "Hi."),
        ("<|message|>Hi.<|eot|>", "", "Hi."),
        ("Hi.", "", "Hi."),
        (" to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Hi.", "Hm.", "Hi."),
        (" to=user<|message|>I look.<|eom|><|start|>assistant to=user<|message|> Yes.", "", "I look. Yes."),
        (f" to=user<|message|>Write {INVOKE}.", "", f"Write {INVOKE}."),
        (f" to=self<|message|>{INVOKE}<|eom|>", INVOKE, ""),
        (" to=f<|message|>Is that a call?<|eom|>", "", "Is that a call?"),
        (
            " to=f<|message|><atem:function_calls>\n</atem:function_calls>",
            "",
            "<atem:function_calls>\n</atem:function_calls>",
        ),
        (" to=selfie<|message|>Hi.", "", "Hi."),
    ],
)
def test_the_recipient_of_a_message_shows_what_it_is(text: str, reasoning: str, content: str) -> None:
    check_transcript(MUSE_GLIMMER, Transcript(text, reasoning, content), RECIPIENT_TOKENS)


@pytest.mark.parametrize("end", ["<|eom|><|start|>assistant", "<|eom|>", "", "<|start|>assistant", "\n"])
def test_a_message_to_a_tool_may_follow_without_the_end_of_the_one_before(end: str) -> None:
    text = f" to=self<|message|>Set to=5 to the time.{end}{CALL}"
    expected = Transcript(text, reasoning="Set to=5 to the time.", calls=[("f", {"a": 1})])
    check_transcript(MUSE_GLIMMER, expected, RECIPIENT_TOKENS)


@pytest.mark.parametrize("text", ["a to", "a to=", "a t", "a\n", "a to=b c to=", "a to=b<|x|>", "to=b"])
def test_the_beginning_of_a_header_is_text_if_no_header_comes_of_it(text: str) -> None:
    check_transcript(MUSE_GLIMMER, Transcript(f" to=user<|message|>{text}", content=text), RECIPIENT_TOKENS)
    check_transcript(MUSE_GLIMMER, Transcript(f" to=self<|message|>{text}", reasoning=text), RECIPIENT_TOKENS)


def test_a_message_to_a_tool_may_hold_several_calls() -> None:
    two = CALL.replace(INVOKE, f"{INVOKE}\n{INVOKE}")
    check_transcript(MUSE_GLIMMER, Transcript(two, calls=[("f", {"a": 1})] * 2), RECIPIENT_TOKENS)
    unwrapped = f" to=f<|message|>{INVOKE}"
    check_transcript(MUSE_GLIMMER, Transcript(unwrapped, calls=[("f", {"a": 1})]), RECIPIENT_TOKENS)


def test_without_tools_a_message_to_one_is_content() -> None:
    content = CALL.partition("<|message|>")[2]
    check_transcript(MUSE_GLIMMER, Transcript(CALL, content=content, has_calls=False), RECIPIENT_TOKENS)


@pytest.mark.parametrize(
    ("tools", "name"), [(["f"], "f"), (["f.f"], "f.f"), (["f", "f.f"], "f.f"), (["g"], "f.f"), ([], "f.f")]
)
def test_a_name_in_its_own_namespace_is_that_of_the_tool_without_it(tools: list[str], name: str) -> None:
    transcript = Transcript(
        CALL.replace('"f"', '"f.f"'), calls=[(name, {"a": 1})], tools={tool: {"properties": {}} for tool in tools}
    )
    check_transcript(MUSE_GLIMMER, transcript, RECIPIENT_TOKENS)
