"""Hermes' format: reasoning, content and calls, with tokens of its own and in ordinary text."""

import pytest

from proa_gateway.parsing.json_formats import HERMES
from support.transcripts import PLAIN, Transcript, check_transcript

TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ROME = {"city": "Rome"}
WITH_AND_WITHOUT_TOKENS = {
    "content": Transcript("Hello, wörld 😀.\n", content="Hello, wörld 😀.\n"),
    "whitespace alone": Transcript(" \n ", content=" \n "),
    "nothing": Transcript(""),
    "one call": Transcript(call("f", '{"city": "Rome"}'), calls=[("f", ROME)]),
    "content and a call": Transcript("I look.\n\n" + call("f"), content="I look.", calls=[("f", {})]),
    "calls in a row": Transcript(
        call("f", "[1]") + "\n" + call("fg") + call("f"), calls=[("f", [1]), ("fg", {}), ("f", {})]
    ),
    "text between calls": Transcript(
        call("f") + "\nand\n" + call("g") + "\n\nDone. ", content="andDone. ", calls=[("f", {}), ("g", {})]
    ),
    "a call without whitespace": Transcript(
        '<tool_call>{"name":"f","arguments":{"city":"Rome"}}</tool_call>', calls=[("f", ROME)]
    ),
    "thinks": Transcript("<think>\nHm. 😀\n</think>\n\nYes.", reasoning="Hm. 😀", content="Yes."),
    "does not think": Transcript("\n\nYes.", content="\n\nYes."),
    "thinks about nothing": Transcript("<think>\n\n</think>\n\nYes.", content="Yes."),
    "never ends to think": Transcript("<think>\nHm, a < b\n", reasoning="Hm, a < b\n"),
    "the prompt opened reasoning": Transcript(
        "\nHm.</think>Yes.", reasoning="Hm.", content="Yes.", reasoning_open=True
    ),
    "opens reasoning that is open": Transcript(
        "<think>\nHm.\n</think>\nYes.", reasoning="Hm.", content="Yes.", reasoning_open=True
    ),
    "closes reasoning twice": Transcript("<think>a</think>\n</think>\nYes.</think>", reasoning="a", content="Yes."),
    "thinks twice": Transcript("<think>a</think>\n<think>b</think>c", reasoning="ab", content="c"),
    "thinks between calls": Transcript(
        call("f") + "\n<think>\nb\n</think>\n" + call("g"), reasoning="b", calls=[("f", {}), ("g", {})]
    ),
    "thinks and calls": Transcript("<think>\na\n</think>\n\n" + call("f"), reasoning="a", calls=[("f", {})]),
    "calls within reasoning": Transcript(
        "<think>a\n" + call("f") + "\nb", reasoning="a", content="b", calls=[("f", {})]
    ),
    "a call within reasoning that is none": Transcript(
        "<think>I could use <tool_call> here.</think>Yes.", reasoning="I could use <tool_call> here.", content="Yes."
    ),
    "an opening alone": Transcript("a <tool_call>", content="a <tool_call>"),
    "an opening before a call": Transcript("a <tool_call>" + call("f"), content="a <tool_call>", calls=[("f", {})]),
    "an opening before text": Transcript("Use <tool_call> for it.", content="Use <tool_call> for it."),
    "beginnings of tags": Transcript("<thin <tool_cal </think a<", content="<thin <tool_cal </think a<"),
    "no name": Transcript(
        'a\n<tool_call>\n{"arguments": {"city": "Rome"}}\n</tool_call>',
        content='a\n<tool_call>\n{"arguments": {"city": "Rome"}}\n</tool_call>',
    ),
    "the name is no string": Transcript('<tool_call>{"name": 1}', content='<tool_call>{"name": 1}'),
    "broken before the name": Transcript('<tool_call>{"name: f}} x', content='<tool_call>{"name: f}} x'),
    "truncated within the name": Transcript('<tool_call>\n{"name": "f', content='<tool_call>\n{"name": "f'),
    "truncated after the name": Transcript('<tool_call>\n{"name": "f", "arg', calls=[("f", "")]),
    "truncated within the arguments": Transcript(
        call("f") + '<tool_call>\n{"name": "g", "arguments": {"city": "Ro', calls=[("f", {}), ("g", '{"city": "Ro')]
    ),
    "truncated after the arguments": Transcript(
        '<tool_call>{"name": "f", "arguments": {"a": 1}', calls=[("f", {"a": 1})]
    ),
    "arguments before the name": Transcript(
        '<tool_call>{"arguments": {"name": "x", "arguments": {}}, "name": "f"}</tool_call>',
        calls=[("f", {"name": "x", "arguments": {}})],
    ),
    "other keys": Transcript(
        '<tool_call>{"type": {"name": "x"}, "name": "f", "a": [{}, "}"], "arguments": {"b": 1}, "i": 0}</tool_call>',
        calls=[("f", {"b": 1})],
    ),
    "parameters for arguments": Transcript(
        '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', calls=[("f", {"a": 1})]
    ),
    "no arguments": Transcript('<tool_call>\n{"name": "f"}\n</tool_call>', calls=[("f", {})]),
    "a brace too many": Transcript(call("f", '{"a": 1}}'), calls=[("f", {"a": 1})]),
    "a name with quotes and dots": Transcript(call(r"a.\"b\"-ü\u00e9\n"), calls=[('a."b"-üé\n', {})]),
    "a name with a lone surrogate": Transcript(call(r"a\ud800"), calls=[("a?", {})]),
    "a long name": Transcript(call("n" * 64), calls=[("n" * 64, {})]),
    "tags in a string": Transcript(
        call("f", rf'{{"a": "</tool{PLAIN}_call> <tool{PLAIN}_call> \"</thi{PLAIN}nk>\\"}}'),
        calls=[("f", {"a": '</tool_call> <tool_call> "</think>\\'})],
    ),
    "surrogates in a string": Transcript(
        call("f", r'{"a": "\ud83d\ude00 \ud800 </parameter> <|im_end|> \u0000"}'),
        calls=[("f", '{"a": "\\ud83d\\ude00 \\ud800 </parameter> <|im_end|> \\u0000"}')],
    ),
    "calls are not parsed": Transcript(
        "<think>a</think>" + call("f"), reasoning="a", content=call("f"), has_calls=False
    ),
}


@pytest.mark.parametrize("name", WITH_AND_WITHOUT_TOKENS)
def test_transcript_is_the_same_message_however_it_is_cut(name: str) -> None:
    check_transcript(HERMES, WITH_AND_WITHOUT_TOKENS[name], TOKENS)


@pytest.mark.parametrize("name", WITH_AND_WITHOUT_TOKENS)
def test_transcript_is_the_same_message_in_ordinary_text(name: str) -> None:
    check_transcript(HERMES, WITH_AND_WITHOUT_TOKENS[name])
