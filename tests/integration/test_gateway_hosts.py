"""What web pages can make a visitor's browser send: requests under their own name, and forms."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.fake_engine import FakeEngine, say
from support.gateway import RunningGateway, chat_body, running_gateway

CHAT = "/v1/chat/completions"
PAGE = {"host": "attacker.example:8000", "origin": "http://attacker.example:8000"}
OPERATORS = ("/reset_prefix_cache", "/sleep", "/wake_up", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
ALL_ROUTES: dict[str, Any] = {"enable_dev_endpoints": True, "enable_runtime_lora_updating": True}


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(script=say("one")) as engine:
        yield engine


async def chat_status(gateway: RunningGateway, **headers: str) -> int:
    return (await gateway.http.post(CHAT, json=chat_body(), headers=headers)).status_code


async def test_without_keys_a_page_that_resolves_to_the_gateway_gets_no_answer(engine: FakeEngine) -> None:
    async with running_gateway(engine, **ALL_ROUTES) as gateway:
        for method, path in [("POST", CHAT), ("GET", "/v1/models"), *(("POST", path) for path in OPERATORS)]:
            answer = await gateway.http.request(method, path, json={}, headers=PAGE)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (403, "host_not_allowed"), path
            assert "--allowed-hosts attacker.example" in error["message"]
        messages = await gateway.http.post("/v1/messages", json={}, headers=PAGE)
        assert messages.json()["error"]["type"] == "permission_error"
        assert (await gateway.http.get("/health", headers=PAGE)).status_code == 200  # a path that never needs a key
        for own in (f"127.0.0.1:{gateway.port}", f"localhost:{gateway.port}", "proa-gateway"):
            assert await chat_status(gateway, host=own) == 200
        rejected = 'proa_gateway_admission_rejections_total{reason="host"}'
        assert rejected in (await gateway.http.get("/metrics")).text
    assert len(engine.requests) == 3


async def test_names_that_are_given_are_answered(engine: FakeEngine) -> None:
    async with running_gateway(engine, allowed_hosts=("llm.example.com", "*.example.org")) as gateway:
        assert await chat_status(gateway, host="llm.example.com") == 200
        assert await chat_status(gateway, host="a.example.org:443") == 200
        assert await chat_status(gateway, host="example.com") == 403


async def test_with_keys_every_name_is_answered(engine: FakeEngine, tmp_path: Path) -> None:
    async with running_gateway(engine, api_key=("sk-1",)) as gateway:
        assert await chat_status(gateway, host="llm.example.com", authorization="Bearer sk-1") == 200
        assert await chat_status(gateway, host="llm.example.com") == 401


@pytest.mark.parametrize(
    "headers",
    [
        {},  # fetch() without a body
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "text/plain;charset=UTF-8"},
        {"content-type": "text/plain; application/json"},
    ],
)
async def test_no_form_of_a_page_reaches_an_operators_route(engine: FakeEngine, headers: dict[str, str]) -> None:
    async with running_gateway(engine, **ALL_ROUTES) as gateway:
        for path in OPERATORS:
            body = b'{"lora_name": "a", "lora_path": "/a"}'
            answer = await gateway.http.post(path, content=body, headers={**headers, "origin": "http://a.example"})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (403, "header_missing"), path
            assert "Content-Type: application/json" in error["message"]
        assert (await gateway.http.get("/is_sleeping")).status_code != 403


@pytest.mark.parametrize("headers", [{"content-type": "application/json"}, {"authorization": "Bearer EMPTY"}])
async def test_a_header_that_browsers_ask_for_first_opens_them(engine: FakeEngine, headers: dict[str, str]) -> None:
    async with running_gateway(engine, **ALL_ROUTES) as gateway:
        asked = {"origin": "http://a.example", "access-control-request-method": "POST"}
        preflight = await gateway.http.options("/sleep", headers={**asked, "access-control-request-headers": "x"})
        assert "access-control-allow-origin" not in preflight.headers
        for path in OPERATORS:
            answer = await gateway.http.post(path, headers=headers)
            assert answer.status_code != 403, path
