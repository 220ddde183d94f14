"""Calls with random arguments, as each format's models write them, are read exactly, in pieces of every size."""

import json
from random import Random

import pytest

from support.format_writers import WRITERS, Call, Writer
from support.transcripts import Replay, Transcript

NUM_SAMPLES = 200
MAX_PIECE = 7  # characters
NAMES = ("get", "get_weather", "save-note.v2")
PARTS = (
    "a",
    "word ",
    "é",
    "😀",
    "<",
    "</",
    ">",
    '"',
    "'",
    "\\",
    "\n",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "=",
    "&",
    "|",
    "0",
)
SCHEMA = {
    "properties": {
        "text": {"type": "string"},
        "number": {"type": "number"},
        "is_new": {"type": "boolean"},
        "names": {"type": "array", "items": {"type": "string"}},
        "where": {"type": "object", "properties": {"name": {"type": "string"}}},
    }
}


def text(random: Random) -> str:
    return "".join(random.choices(PARTS, k=random.randrange(9)))


def arguments(random: Random) -> dict[str, object]:
    values: dict[str, object] = {
        "text": text(random),
        "number": random.choice([0, -3, 1.5, 12345678901]),
        "is_new": random.random() < 0.5,
        "names": [text(random) for _ in range(random.randrange(3))],
        "where": {"lat": -1.5, "name": text(random), "none": None},
    }
    return {name: values[name] for name in random.sample(sorted(values), random.randrange(len(values) + 1))}


CASES = [(writer, has_tokens) for writer in WRITERS for has_tokens in (True, False) if has_tokens or writer.may_be_text]


@pytest.mark.parametrize(
    ("writer", "has_tokens"),
    CASES,
    ids=[f"{writer.tool_format.name}-{'tokens' if has_tokens else 'text'}" for writer, has_tokens in CASES],
)
def test_sampled_calls_are_read_back_in_pieces(writer: Writer, has_tokens: bool) -> None:
    random = Random(writer.tool_format.name)
    for sample in range(NUM_SAMPLES):
        calls: list[Call] = [(random.choice(NAMES), arguments(random)) for _ in range(random.randrange(1, 4))]
        transcript = Transcript(writer.calls(calls), tools=dict.fromkeys(NAMES, SCHEMA))
        message = Replay(writer.tool_format, transcript, writer.tokens if has_tokens else ()).in_pieces(
            1 + sample % MAX_PIECE
        )
        assert [(call.name, json.loads(call.arguments)) for call in message.calls] == calls, transcript.text
        assert not message.content
