"""JSON that parsers accept and UTF-8, 64 bits or a stack do not hold: clients get an error that names the field."""

import json
import logging
from collections.abc import AsyncIterator
from io import StringIO
from typing import Any

import httpx
import pytest
import pytest_asyncio

from proa.logs import make_handler
from support.fake_engine import CHAT_TEMPLATE, FakeEngine, say
from support.gateway import RunningGateway, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
SURROGATE = "\ud800"
HUGE = 2**70
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TEXT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[RunningGateway]:
    settings: dict[str, Any] = {"enable_runtime_lora_updating": True, "access_log": True, "tool_call_parser": "hermes"}
    template = "{{ tools | tojson if tools }}" + CHAT_TEMPLATE
    async with (
        FakeEngine(script=say("Some words.")) as engine,
        running_gateway(engine, chat_template=template, **settings) as gateway,
    ):
        yield gateway


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


async def post(gateway: RunningGateway, path: str, body: Any) -> httpx.Response:
    content = json.dumps(body).encode()
    return await gateway.http.post(path, content=content, headers={"content-type": "application/json"})


def function(schema: Any, **fields: Any) -> list[Any]:
    return [{"type": "function", "name": "f", "parameters": schema, **fields}]


def chat_function(schema: Any, **fields: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", "parameters": schema}, **fields}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {**TEXT, "model": SURROGATE}, "model"),
        ("/v1/completions", {"model": SURROGATE, "prompt": "Hi"}, "model"),
        ("/v1/embeddings", {"model": SURROGATE, "input": "Hi"}, "model"),
        ("/tokenize", {"model": SURROGATE, "prompt": "Hi"}, "model"),
        ("/v1/load_lora_adapter", {"lora_name": SURROGATE, "lora_path": "/a"}, "lora_name"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": SURROGATE}, "lora_path"),
        ("/v1/unload_lora_adapter", {"lora_name": SURROGATE}, "lora_name"),
        (CHAT, {**TEXT, "tools": chat_function({SURROGATE: {}})}, "tools[0].function.parameters.[key]"),
        (CHAT, {**TEXT, "tools": chat_function({"a": [SURROGATE]})}, "tools[0].function.parameters.a"),
        (CHAT, {**TEXT, "tools": chat_function({}, **{SURROGATE: 1})}, "tools[0]"),
        (CHAT, {**TEXT, "repetition_detection": {"min_count": HUGE}}, "repetition_detection"),
        (RESPONSES, {"input": "Hi", "tools": function({SURROGATE: {}})}, "tools"),
        (RESPONSES, {"input": "Hi", "tools": function({"maximum": HUGE})}, "tools"),
        (RESPONSES, {"input": "Hi", "tools": function({}, extra=-HUGE)}, "tools"),
        (RESPONSES, {"input": "Hi", "tools": function(nested(300))}, "tools"),
        (RESPONSES, {"input": "Hi", "text": {"format": {"type": "text", "more": HUGE}}}, "text"),
        (RESPONSES, {"input": "Hi", "tool_choice": {"type": "function", "name": "f", "more": HUGE}}, "tool_choice"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_error_names_the_field(
    gateway: RunningGateway, path: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    answer = await post(gateway, path, {**body, **({"stream": True} if path in (CHAT, RESPONSES) and stream else {})})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


async def test_a_response_repeats_what_64_bits_and_200_levels_hold(gateway: RunningGateway) -> None:
    tools = function({"maximum": 2**64 - 1, "minimum": -(2**63), "deep": nested(200)})
    answer = await post(gateway, RESPONSES, {"input": "Hi", "tools": tools})
    assert answer.status_code == 200, answer.text
    assert answer.json()["tools"][0]["parameters"] == tools[0]["parameters"]
    again = await gateway.http.get(f"{RESPONSES}/{answer.json()['id']}")
    assert again.json()["tools"] == answer.json()["tools"]


async def test_the_access_log_has_a_line_for_a_model_without_utf_8(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="proa_gateway.access_log")
    for path, body in ((CHAT, TEXT), (MESSAGES, TEXT), ("/v1/embeddings", {"input": "Hi"})):
        await post(gateway, path, {**body, "model": SURROGATE})
    stream = StringIO()
    handler = make_handler("json", stream, "gateway")
    for record in caplog.records:
        handler.emit(record)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["path"], line["status"]) for line in lines] == [(CHAT, 400), (MESSAGES, 400), ("/v1/embeddings", 400)]


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
async def test_a_fault_of_messages_has_the_form_of_anthropic(
    gateway: RunningGateway, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(type(gateway.gateway.admission.lookup), "check", fail)
    monkeypatch.setattr(type(gateway.gateway.admission.lookup), "name", fail)
    answer = await post(gateway, path, TEXT)
    assert answer.status_code == 500
    error = answer.json()
    assert error["type"] == "error"
    assert error["error"] == {"type": "api_error", "message": "The gateway failed."}
    assert error["request_id"] == answer.headers["request-id"]
    assert (await post(gateway, CHAT, TEXT)).json()["error"]["type"] == "server_error"
