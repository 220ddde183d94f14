"""Paths with a slash at their end, and the method HEAD, for all routes of the application."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Route

from proa_gateway.app import create_app
from proa_gateway.config import GatewayConfig
from support.fake_engine import FakeEngine, say
from support.gateway import RunningGateway, chat_body, running_gateway

EVERYTHING: dict[str, Any] = {
    "enable_dev_endpoints": True,
    "enable_runtime_lora_updating": True,
    "enable_tokenizer_info_endpoint": True,
}


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    async with FakeEngine(script=say("one two")) as engine, running_gateway(engine, **EVERYTHING) as gateway:
        yield gateway


def paths(method: str) -> Iterator[str]:
    """The application's paths with the method, parameters filled in."""
    routes: list[BaseRoute] = create_app(GatewayConfig(**EVERYTHING)).routes
    for route in routes:
        if isinstance(route, APIRoute | Route) and method in (route.methods or ()):
            yield route.path.replace("{model:path}", "fake").replace("{response_id}", "resp_1")


async def test_a_slash_at_the_end_of_a_path_is_the_same_path(gateway: RunningGateway) -> None:
    for path in {*paths("POST")} - {"/"}:
        plain, slash = [await gateway.http.post(f"{path}{end}", json={}) for end in ("", "/")]
        assert (slash.status_code, slash.is_redirect) == (plain.status_code, False), path
    answer = await gateway.http.post("/v1/chat/completions/", json=chat_body())
    assert answer.json()["choices"][0]["message"]["content"] == "one two"
    assert (await gateway.http.post("/v1/messages/", json={})).json()["type"] == "error"  # Anthropic's


async def test_get_routes_answer_a_slash_and_head(gateway: RunningGateway) -> None:
    gets = {*paths("GET")}
    assert gets > {"/", "/chat.js", "/health", "/ready", "/metrics", "/version", "/v1/models", "/docs", "/openapi.json"}
    for path in gets:
        plain = await gateway.http.get(path)
        for method, same in (("GET", f"{path}/"), ("HEAD", path), ("HEAD", f"{path}/")):
            answer = await gateway.http.request(method, same if path != "/" else path)
            assert answer.status_code == plain.status_code, (method, same)
            assert answer.headers.get("content-type") == plain.headers.get("content-type")
            if method == "HEAD":
                assert not answer.content
                assert "content-length" in answer.headers
    assert len((await gateway.http.head("/v1/models/fake")).headers["content-length"]) > 2


async def test_head_of_other_routes_and_unknown_paths_is_an_error(gateway: RunningGateway) -> None:
    assert (await gateway.http.head("/v1/chat/completions")).status_code == 405
    assert (await gateway.http.head("/v1/unheard-of/")).status_code == 404
