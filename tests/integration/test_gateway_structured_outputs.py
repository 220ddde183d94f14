"""Constraints of the output, from the request to the engine: the grammar that is sent, errors, warnings, routing."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from proa.engine.v1 import core_pb2
from support.fake_engine import FakeEngine, Reply, say
from support.gateway import RunningGateway, chat_body, running_gateway, until
from support.tokenizers import byte_level_tokenizer

WARNINGS = "x-proa-warnings"
UNION = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
UNIQUE = {"type": "array", "uniqueItems": True}
CHOICE: dict[str, Any] = {"structured_outputs": {"choice": ["yes", "no"]}}
REFUSED = [
    ({"guided_json": {"enum": []}}, "guided_json", "Unsatisfiable"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"items": UNIQUE}, "strict": True}}},
        "response_format",
        "$[*]: uniqueItems is not supported",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": UNION, "strict": True}}},
        "response_format",
        "oneOf",
    ),
    ({"structured_outputs": {"json": {"$ref": "#/$defs/nothing"}}}, "structured_outputs.json", "nothing"),
    ({"structured_outputs": {"regex": "[.*"}}, "structured_outputs.regex", "unclosed character class"),
    ({"regex": "(?=a)b"}, "regex", "look-around"),
    ({"guided_choice": ["\ud800"]}, "guided_choice", "surrogate"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one string"),
    ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar", "Lark"),
    ({"ebnf": "root ::= nothing"}, "ebnf", "nothing"),
    (
        {"response_format": {"type": "structural_tag", "structures": [], "triggers": ["<"]}},
        "response_format",
        "structures",
    ),
    ({"guided_json": {"enum": ["x" * 300_000]}}, "guided_json", "at most 262144 bytes"),
]


def schema(value: Any, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": value, **fields}}}


def completed(text: str) -> Reply:
    """A reply that ends because the grammar allows nothing more."""
    return Reply(byte_level_tokenizer().encode(text).ids, core_pb2.FINISH_REASON_COMPLETE)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(script=say("one two three")) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: FakeEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine) as gateway:
        yield gateway


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_both_endpoints_send_the_grammar_with_every_choice(
    gateway: RunningGateway, engine: FakeEngine, n: int, stream: bool
) -> None:
    for request in (gateway.chat, gateway.complete):
        engine.requests.clear()
        response = await request(n=n, stream=stream, max_tokens=2, **CHOICE)
        assert response.status_code == 200, response.text
        texts = [request.sampling_params.grammar.text for request in engine.requests]
        assert texts == ['start: CHOICE\nCHOICE: "yes" | "no"\n'] * n


async def test_neutral_values_send_no_grammar(gateway: RunningGateway, engine: FakeEngine) -> None:
    fields: dict[str, Any] = {
        "response_format": {"type": "text"},
        "structured_outputs": {},
        "guided_json": None,
        "regex": "",
    }
    assert (await gateway.chat(**fields)).status_code == 200
    assert not engine.requests[0].sampling_params.HasField("grammar")


async def test_a_complete_grammar_ends_with_stop_and_its_last_token(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    engine.script = lambda request: completed('{"a": 1}')
    for stop in (None, ["}"]):
        choice = (await gateway.chat(stop=stop, logprobs=True, **schema({"type": "object"}))).json()["choices"][0]
        assert choice["message"]["content"] == ('{"a": 1}' if stop is None else '{"a": 1')
        assert choice["finish_reason"] == "stop"
    choice = (await gateway.complete(echo=True, max_tokens=3, **schema({"type": "object"}))).json()["choices"][0]
    assert choice["text"].startswith('Hi{"')
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(("fields", "param", "reason"), REFUSED)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_constraint_that_cannot_be_held_is_refused_by_field_and_keyword(
    gateway: RunningGateway, engine: FakeEngine, fields: dict[str, Any], param: str, reason: str, path: str
) -> None:
    body = json.dumps({**chat_body(stream=True), "prompt": "Hi", **fields})  # with escapes for lone surrogates
    response = await gateway.http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, "invalid_value")
    assert error["message"].startswith(f"{param}: ")
    assert reason in error["message"]
    assert not engine.requests


async def test_several_constraints_are_refused(gateway: RunningGateway) -> None:
    response = await gateway.chat(**CHOICE, **schema({}))
    assert response.status_code == 400
    assert "response_format and structured_outputs.choice" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_schema_does_not_enforce_is_a_warning_and_logged_once(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    fields = schema({"anyOf": [UNION, {"type": "string", "format": "naïve\r\nX: 1"}]})
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            response = await gateway.chat(stream=stream, unheard_of=1, **fields)
    assert response.status_code == 200
    warnings = response.headers[WARNINGS]
    assert warnings.isascii()
    assert "response_format: $: oneOf is enforced as anyOf" in warnings
    assert "format 'na\\xefve" in warnings
    assert response.headers["x-proa-ignored-fields"] == "unheard_of"
    assert len([record for record in caplog.records if "anyOf" in record.getMessage()]) == 1


async def test_many_warnings_make_a_short_header(gateway: RunningGateway) -> None:
    formats = [{"format": f"{number}" * 50} for number in range(500)]
    response = await gateway.chat(**schema({"anyOf": formats}))
    assert response.status_code == 200
    assert 0 < len(response.headers[WARNINGS]) < 4096
    assert WARNINGS not in (await gateway.chat(**CHOICE)).headers


async def test_a_constrained_output_of_one_digit_ends_with_length_and_a_warning(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    engine.script = say("3" * 100, repeat=True)
    fields: dict[str, Any] = {"max_tokens": 90, **schema({"type": "number"})}

    response = await gateway.chat(**fields)
    choice = response.json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "repetition_detected")
    assert len(choice["message"]["content"]) == 60
    assert "the same digits 60 times in a row" in response.headers[WARNINGS]
    assert response.json()["usage"]["completion_tokens"] == 60
    await engine.until(lambda engine: not engine.num_unfinished)

    *_, last, _ = await gateway.events("/v1/chat/completions", chat_body(stream=True, **fields))
    assert last["choices"][0]["finish_reason"] == "length"

    other = {"max_tokens": 90, "repetition_detection": {"max_pattern_size": 0}}
    for unbounded in ({**fields, **other}, {"max_tokens": 90}):
        response = await gateway.chat(**unbounded)
        assert len(response.json()["choices"][0]["message"]["content"]) == 90
        assert WARNINGS not in response.headers


async def test_engines_without_grammars_get_none(gateway: RunningGateway, engine: FakeEngine) -> None:
    async with FakeEngine(grammars=False) as old, running_gateway(old) as gateway_of_old:
        response = await gateway_of_old.chat(**CHOICE)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "unsupported_parameter")
        assert error["param"] == "structured_outputs.choice"
        assert (await gateway_of_old.chat()).status_code == 200
        assert len(old.requests) == 1


async def test_of_a_mixed_pool_only_engines_with_grammars_get_them(engine: FakeEngine) -> None:
    async with FakeEngine(grammars=False) as old, running_gateway(old, engine) as gateway:
        for _ in range(8):
            assert (await gateway.chat(**CHOICE)).status_code == 200
        assert (len(old.requests), len(engine.requests)) == (0, 8)
        await engine.stop()
        response = await gateway.chat(**CHOICE)
        assert response.status_code in (400, 503)
        assert not old.requests
        assert (await gateway.chat()).status_code == 200


async def test_a_failover_sends_the_grammar_with_the_tokens_received() -> None:
    script = say("one two three four five six", repeat=True)
    engines = [FakeEngine(script=script, step_delay=0.05) for _ in range(2)]
    async with engines[0], engines[1], running_gateway(*engines) as gateway:
        asking = asyncio.create_task(gateway.complete(max_tokens=30, **CHOICE))
        await until(lambda: any(engine.step_count > 3 and engine.requests for engine in engines))
        lost, other = sorted(engines, key=lambda engine: not engine.requests)
        await lost.stop()
        assert (await asking).status_code == 200
    (resumed,) = other.requests
    assert resumed.resumed_token_ids
    assert resumed.sampling_params.grammar == lost.requests[0].sampling_params.grammar
