"""Every tool format, with tokens of its own and in ordinary text: the same messages, however the output is cut."""

import pytest

from proa_gateway.parsing.tagged_formats import KIMI_K3
from support.format_writers import WRITERS, Call, Writer
from support.transcripts import Replay, Transcript, check_transcript

EMPTY: Call = ("clock", {})
ROME: Call = ("weather", {"city": "Rome", "days": 3})
NESTED: Call = (
    "save-note.v2",
    {
        "text": '😀 "ü" \\ and\nlines <b>',
        "where": {"lat": -1.5e-3, "names": ["it's", "", [None]]},
        "is_new": True,
        "empty": "",
        "number_like": "42",
    },
)
SCHEMAS = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "save-note.v2": {
        "properties": {
            "text": {"type": "string"},
            "where": {"type": "object"},
            "is_new": {"type": "boolean"},
            "empty": {"type": "string"},
            "number_like": {"type": "string"},
        }
    },
}

WITH_TOKENS = [(writer, True) for writer in WRITERS]
AS_TEXT = [(writer, False) for writer in WRITERS if writer.may_be_text]


def each(cases: list[tuple[Writer, bool]]) -> pytest.MarkDecorator:
    ids = [f"{writer.tool_format.name}-{'tokens' if has_tokens else 'text'}" for writer, has_tokens in cases]
    return pytest.mark.parametrize(("writer", "has_tokens"), cases, ids=ids)


each_writer = each(WITH_TOKENS + AS_TEXT)
each_with_content = each([case for case in WITH_TOKENS + AS_TEXT if case[0].allows_content])
each_with_reasoning = each([case for case in WITH_TOKENS + AS_TEXT if case[0].reasoning is not None])


def check(writer: Writer, has_tokens: bool, transcript: Transcript) -> None:
    check_transcript(writer.tool_format, transcript, writer.tokens if has_tokens else ())


@each_writer
@pytest.mark.parametrize("calls", [[EMPTY], [ROME, EMPTY], [NESTED]], ids=["empty", "two", "nested"])
def test_calls_have_the_arguments_that_were_written(writer: Writer, has_tokens: bool, calls: list[Call]) -> None:
    check(writer, has_tokens, Transcript(writer.calls(calls), calls=calls, tools=SCHEMAS))


@each_with_content
def test_content_may_stand_before_and_after_calls(writer: Writer, has_tokens: bool) -> None:
    text = f"Let me see, « naïve ».\n\n{writer.calls([ROME, EMPTY])}\n\nDone."
    expected = Transcript(text, content="Let me see, « naïve ».Done.", calls=[ROME, EMPTY], tools=SCHEMAS)
    check(writer, has_tokens, expected)


@each_with_reasoning
def test_reasoning_is_kept_apart(writer: Writer, has_tokens: bool) -> None:
    assert writer.reasoning is not None
    opening, closing = writer.reasoning
    text = f"{opening}Hm, 😀?{closing}{writer.calls([ROME])}"
    check(writer, has_tokens, Transcript(text, reasoning="Hm, 😀?", calls=[ROME], tools=SCHEMAS))


@each_writer
def test_text_without_calls_is_content(writer: Writer, has_tokens: bool) -> None:
    for text in ("Hello.", "a < b <|x|> [1, 2] {3}\n```json\n{}\n```", "No\n\ncalls\n"):
        check(writer, has_tokens, Transcript(text, content=text))


@each_writer
def test_an_output_that_is_cut_in_what_closes_a_call_has_no_content(writer: Writer, has_tokens: bool) -> None:
    text = writer.calls([EMPTY])
    replay = Replay(writer.tool_format, Transcript(text), writer.tokens if has_tokens else ())
    for message in replay.truncated_at(*range(len(text))):
        assert not (message.calls and message.content), message


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
def test_the_tags_of_an_answer_are_no_content(has_tokens: bool) -> None:
    writer = next(writer for writer in WRITERS if writer.tool_format is KIMI_K3)
    answer = "<|open|>response<|sep|>Let me see.<|close|>response<|sep|>"
    text = f"<|open|>think<|sep|>Hm?<|close|>think<|sep|>{answer}{writer.calls([ROME])}<|close|>message<|sep|>"
    check(writer, has_tokens, Transcript(text, reasoning="Hm?", content="Let me see.", calls=[ROME], tools=SCHEMAS))
