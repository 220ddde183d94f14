"""What a format's grammar allows, the format's parser reads as calls that match the tools' schemas."""
# ruff: noqa: RUF001 - DeepSeek's tokens have a fullwidth bar

import json
from random import Random

import pytest
from jsonschema import Draft202012Validator

from proa.grammar import check
from proa_gateway.parsing.format import FunctionTool
from proa_gateway.parsing.grammars.message import Reasoning, tool_grammar
from support.format_writers import WRITERS, Writer
from support.thorough import seeds
from support.tool_grammars import format_tokenizer, parse_message, random_message

Schema = dict[str, object]

NAMES = ["a", "b_2", "camelCase", "Name", "x"]
LEAVES: list[Schema] = [
    {"type": "string"},
    {"type": "string", "enum": ["a", "two words", "ü\n"]},
    {"type": "string", "const": ""},
    {"type": "string", "pattern": "^[a-c]+$", "maxLength": 3},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "format": "date"},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"anyOf": [{"type": "string", "enum": ["x"]}, {"type": "null"}]},
    {"type": ["string", "null"]},
    {"type": "integer"},
    {"type": "integer", "minimum": 0, "maximum": 20},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "null"},
    {"enum": [1, "one", None]},
    {"type": ["string", "integer"]},
    {},
]


def random_value(random: Random, depth: int) -> Schema:
    kind = random.random()
    if depth and kind < 0.2:
        return random_object(random, depth - 1)
    if depth and kind < 0.4:
        return {"type": "array", "items": random_value(random, depth - 1), "maxItems": 2}
    return random.choice(LEAVES)


def random_object(random: Random, depth: int = 2) -> Schema:
    names = random.sample(NAMES, random.randrange(5))
    properties = {name: random_value(random, depth) for name in names}
    required = [name for name in names if random.random() < 0.5]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


EXITS = [
    '"',
    "}",
    "]",
    "\n</parameter>\n",
    "</parameter>\n",
    "</arg_value>",
    "</arg_value:opensource>\n",
    "</steptml:parameter>\n",
    "</atem:parameter>\n",
    "<|close|>argument<|sep|>",
    "]]></param>",
    "</param>",
    *(f"]<]minimax[>[</{name}>" for name in NAMES),
    "</function>",
    "</｜DSML｜parameter>\n",
    ",",
    "<|end|>",
    "<|eom|>",
    '<|"|>',
    "<escape>",
]
CASES = [(writer, has_tokens) for writer in WRITERS for has_tokens in (True, False) if has_tokens or writer.may_be_text]


@pytest.mark.parametrize(
    ("writer", "has_tokens"),
    CASES,
    ids=[f"{writer.tool_format.name}-{'tokens' if has_tokens else 'text'}" for writer, has_tokens in CASES],
)
def test_every_message_of_the_grammar_is_a_call_that_matches_its_schema(writer: Writer, has_tokens: bool) -> None:
    for seed in seeds(12, thorough=40):
        random = Random(seed)
        walk(writer, has_tokens, random_object(random), random_object(random), random)


def walk(writer: Writer, has_tokens: bool, first: Schema, second: Schema, random: Random) -> None:
    tools = [FunctionTool("get", first, strict=True), FunctionTool("get_2", second, strict=True)]
    schemas = {tool.name: dict(tool.parameters) for tool in tools}
    tokenizer = format_tokenizer(*(writer.tokens if has_tokens else ()))
    made = tool_grammar(
        writer.tool_format,
        tools,
        "required",
        parallel=True,
        reasoning=Reasoning.CLOSED,
        added_tokens=tokenizer.added_tokens,
    )
    assert made is not None
    check(made.grammar.text)
    token_ids = random_message(made.grammar, tokenizer, random, EXITS)
    message = parse_message(writer.tool_format, token_ids, tokenizer, schemas)
    assert not message.content or writer.tool_format.channels, message
    assert message.calls
    for call in message.calls:
        Draft202012Validator(schemas[call.name]).validate(json.loads(call.arguments))
