"""Structured outputs through the gateway, with the built-in model: what OpenAI's client gets matches the constraint."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from support.processes import engine_process, gateway_process

MODEL = "proa-builtin"
SECONDS = 60  # far more than any answer takes, on a busy machine
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "é"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
TAG = {
    "structures": [{"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"}],
    "triggers": ["<f>"],
}


class Person(BaseModel):
    name: Literal["Ann", "Ben"]
    age: int
    is_here: bool


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    engine = engine_process("--model=builtin", "--max-num-batched-tokens=256", env={"OMP_NUM_THREADS": "1"})
    with engine as (_, address), gateway_process(address) as (_, port):
        yield port


@pytest.fixture
async def client(port: int) -> AsyncIterator[AsyncOpenAI]:
    url = f"http://127.0.0.1:{port}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=SECONDS) as made:
        yield made


async def chat(client: AsyncOpenAI, **fields: Any) -> Any:
    """The first choice. Fields of vLLM and SGLang go into `extra_body`."""
    openais = {name: fields.pop(name) for name in ("response_format", "n", "logprobs", "stop") if name in fields}
    completion = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=fields.pop("max_tokens", 150), seed=1, extra_body=fields, **openais
    )
    return completion.choices[0]


async def test_parse_returns_the_pydantic_model(client: AsyncOpenAI) -> None:
    completion = await client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Person, seed=1)
    assert isinstance(completion.choices[0].message.parsed, Person)
    assert completion.choices[0].finish_reason == "stop"


async def test_streamed_and_whole_answers_are_the_same_json_of_the_schema(client: AsyncOpenAI) -> None:
    whole = await chat(client, response_format=FORMAT)
    assert whole.finish_reason == "stop"
    jsonschema.validate(json.loads(whole.message.content), SCHEMA)
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=150, seed=1, response_format=FORMAT, stream=True
    )
    events = [event.choices[0] async for event in stream]
    assert "".join(event.delta.content or "" for event in events) == whole.message.content
    assert events[-1].finish_reason == "stop"


async def test_every_choice_matches_and_its_logprobs_are_of_all_its_text(client: AsyncOpenAI) -> None:
    completion = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=150, n=4, logprobs=True, response_format=FORMAT
    )
    for choice in completion.choices:
        assert choice.message.content is not None
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        assert choice.logprobs is not None
        tokens = b"".join(bytes(each.bytes or ()) for each in choice.logprobs.content or ())
        assert tokens.decode() == choice.message.content
    assert len({choice.message.content for choice in completion.choices}) > 1


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": r"\d{3}-[a-f]{2}"}}, r"\d{3}-[a-f]{2}"),
        ({"structured_outputs": {"choice": ["yes", "no", "yes or no"]}}, "yes|no|yes or no"),
        ({"structured_outputs": {"choice": [""]}}, ""),
        ({"structured_outputs": {"grammar": 'start: "x" "y"~2..3'}}, "xyy|xyyy"),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "(" root ")"'}}, r"\(*x\)*"),
        ({"structured_outputs": {"json": {"const": [1, {"a": 2}]}}}, re.escape('[1, {"a": 2}]')),
        (
            {"structured_outputs": {"json": {"const": [1, {"a": 2}]}, "disable_any_whitespace": True}},
            re.escape('[1,{"a":2}]'),
        ),
        ({"guided_json": {"enum": [1, "b"]}}, '1|"b"'),
        ({"guided_regex": "[ab]{2}"}, "[ab]{2}"),
        ({"guided_choice": ["a"]}, "a"),
        ({"guided_grammar": 'start: "a"'}, "a"),
        ({"regex": "[ab]{2}"}, "[ab]{2}"),
        ({"ebnf": 'root ::= "a" | "b"'}, "a|b"),
        ({"json_schema": '{"type": "boolean"}'}, "true|false"),
        ({"structural_tag": json.dumps({"format": {"type": "const_string", "value": "<a>b"}})}, "<a>b"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": "a|b"}}}, "a|b"),
    ],
)
async def test_the_output_matches_every_form_of_a_constraint(
    client: AsyncOpenAI, fields: dict[str, Any], pattern: str
) -> None:
    choice = await chat(client, **fields)
    assert re.fullmatch(pattern, choice.message.content), choice.message.content
    assert choice.finish_reason == "stop"


async def test_json_objects_and_old_structural_tags_are_accepted(client: AsyncOpenAI) -> None:
    choice = await chat(client, response_format={"type": "json_object"}, max_tokens=40)
    assert choice.message.content.startswith("{")
    assert (await chat(client, response_format={"type": "structural_tag", **TAG}, max_tokens=20)).message.content
    assert (await chat(client, response_format={"type": "text"}, max_tokens=5)).finish_reason == "length"


async def test_completions_take_constraints_with_echo(client: AsyncOpenAI) -> None:
    completion = await client.completions.create(
        model=MODEL, prompt=["Once", "Then"], echo=True, extra_body={"guided_choice": [" upon"]}
    )
    assert [choice.text for choice in completion.choices] == ["Once upon", "Then upon"]


async def test_max_tokens_and_stop_strings_end_a_constrained_output(client: AsyncOpenAI) -> None:
    cut = await chat(client, response_format=FORMAT, max_tokens=3)
    assert cut.finish_reason == "length"
    assert '{"name": "'.startswith(cut.message.content[:10])
    stopped = await chat(client, response_format=FORMAT, stop=['"age"'])
    assert (stopped.finish_reason, stopped.message.content.rstrip(" ")[-1]) == ("stop", ",")


STRICT_NOT = {
    "type": "json_schema",
    "json_schema": {"name": "any", "strict": True, "schema": {"not": {"minLength": 1}}},
}


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"response_format": STRICT_NOT}, "response_format", "not is not supported"),
        ({"guided_json": {"type": "integer", "multipleOf": 999_983}}, "guided_json", "multipleOf"),
        ({"guided_regex": "(?!a)b"}, "guided_regex", "look-around"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar", "Lark"),
    ],
)
async def test_a_constraint_that_cannot_be_held_is_a_bad_request(
    client: AsyncOpenAI, fields: dict[str, Any], param: str, reason: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=reason) as raised:
        await chat(client, **fields)
    assert raised.value.param == param


HOSTILE: dict[str, dict[str, Any]] = {
    "large enum": {"guided_json": {"enum": [f"value {number}" for number in range(12_000)]}},
    "optional properties": {
        "guided_json": {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(2000)}}
    },
    "long string": {"guided_json": {"type": "string", "minLength": 100_000}},
    "nested repetition": {"guided_regex": "((a{1,100}){1,100}){1,100}"},
    "many states": {"guided_regex": ".*a.{1000}"},
    "nested repetition of rules": {"guided_grammar": 'start: (("a"{1,300}){1,300}){1,300}'},
    "multipleOf": {"guided_json": {"type": "integer", "multipleOf": 999_983}},
    "const of 1 MB": {"guided_json": {"const": "x" * 1_000_000}},
}


async def test_hostile_constraints_are_answered_and_harm_no_other_request(client: AsyncOpenAI) -> None:
    async def ask(**fields: Any) -> str | int:
        """The finish reason, or the status of the error."""
        try:
            reason: str = (await chat(client, max_tokens=8, **fields)).finish_reason
        except openai.APIStatusError as error:
            return error.status_code
        return reason

    alone = {name: await ask(**fields) for name, fields in HOSTILE.items()}
    assert set(alone.values()) <= {"stop", "length", 400}  # 400 also if it gets too complex after some tokens
    assert {alone[name] for name in ("optional properties", "multipleOf", "const of 1 MB")} == {400}
    others = [ask() for _ in range(8)] + [ask(guided_choice=["a", f"b{number}"]) for number in range(8)]
    together = [ask(**fields) for fields in HOSTILE.values()]
    results = await asyncio.gather(*others, *together)
    assert set(results[: len(others)]) <= {"stop", "length"}


async def test_a_small_constraint_overtakes_a_burst_of_large_ones(client: AsyncOpenAI) -> None:
    names = [[f"property_{number}_{index}" for index in range(800)] for number in range(100)]
    schemas = [
        {"type": "object", "properties": {name: {"type": "string", "maxLength": 10} for name in each}, "required": each}
        for each in names
    ]
    statuses: list[int] = []

    async def send(schema: dict[str, Any]) -> None:
        try:
            await chat(client, guided_json=schema, max_tokens=3)
            statuses.append(200)
        except openai.APIStatusError as error:
            statuses.append(error.status_code)

    burst = [asyncio.create_task(send(schema)) for schema in schemas]
    await asyncio.wait(burst, return_when=asyncio.FIRST_COMPLETED)
    assert (await chat(client, guided_choice=["yes", "no"])).message.content in ("yes", "no")
    assert len(statuses) < len(schemas)
    await asyncio.gather(*burst)
    assert set(statuses) <= {200, 429}
