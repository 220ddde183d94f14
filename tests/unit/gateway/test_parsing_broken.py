"""Outputs made of a format's pieces in any order: the same message however they are cut, and no error."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.format_writers import WRITERS, Writer
from support.transcripts import Replay, Transcript

_PIECES = re.compile(r"""(<[^>]*>|\[[A-Z_]+\]|[{}\[\]"(),:]|\s+)""")
_OTHERS = ["x", " ", "\n", "<", "}", '"', "\\"]


def pieces(writer: Writer) -> list[str]:
    """Of two calls and reasoning, and the calls as a whole."""
    calls = writer.calls([("f", {"a": "x y", "b": [1, {"c": None}]}), ("g", {})])
    return [calls, *sorted({*_PIECES.split(calls), *(writer.tool_format.reasoning or ())} - {""}), *_OTHERS]


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.tool_format.name)
@settings(max_examples=30)
@given(data=st.data())
def test_broken_output_is_the_same_message_however_it_is_cut(
    writer: Writer, has_tokens: bool, data: st.DataObject
) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(pieces(writer)), max_size=14)))
    transcript = Transcript(text, reasoning_open=data.draw(st.booleans()))
    replay = Replay(writer.tool_format, transcript, writer.tokens if has_tokens else ())
    list(replay.truncated_at(len(text)))
