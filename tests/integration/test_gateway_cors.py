"""Pages of other origins (CORS), and a gateway under a path of its own."""

from pathlib import Path

import pytest

from proa_gateway.config import Cors, Strings
from support.fake_engine import FakeEngine, say
from support.gateway import chat_body, running_gateway

PAGE = "https://page.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
CHAT = "/v1/chat/completions"


def keys_file(folder: Path) -> Path:
    path = folder / "keys.json"
    path.write_text('{"keys": [{"name": "a", "key": "secret"}]}')
    return path


async def test_without_origins_there_are_no_cors_headers() -> None:
    async with FakeEngine(script=say("one")) as engine, running_gateway(engine) as gateway:
        response = await gateway.http.get("/health", headers={"origin": PAGE})
        assert not any(name.startswith("access-control") for name in response.headers)
        assert (await gateway.http.options(CHAT, headers=PREFLIGHT)).status_code == 405


async def test_a_page_of_an_allowed_origin_may_call_with_a_key(tmp_path: Path) -> None:
    cors = Cors(allowed_origins=Strings((PAGE,)))
    async with (
        FakeEngine(script=say("one two")) as engine,
        running_gateway(engine, cors=cors, api_keys=keys_file(tmp_path)) as gateway,
    ):
        preflight = await gateway.http.options(CHAT, headers=PREFLIGHT)  # browsers send no key with it
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        for stream in (False, True):
            headers = {"origin": PAGE, "authorization": "Bearer secret"}
            response = await gateway.http.post(CHAT, json=chat_body(stream=stream), headers=headers)
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == PAGE
            assert "x-request-id" in response.headers["access-control-expose-headers"]
        denied = await gateway.http.post(CHAT, json=chat_body(), headers={"origin": PAGE})
        assert denied.status_code == 401
        assert denied.headers["access-control-allow-origin"] == PAGE
        assert denied.headers["x-request-id"]
        other = await gateway.http.options(CHAT, headers={**PREFLIGHT, "origin": "https://other.example"})
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers


async def test_a_root_path_is_served_with_and_without_it(tmp_path: Path) -> None:
    async with (
        FakeEngine(script=say("one")) as engine,
        running_gateway(engine, root_path="/llm", api_keys=keys_file(tmp_path)) as gateway,
    ):
        for prefix in ("", "/llm"):
            assert (await gateway.http.get(f"{prefix}/health")).status_code == 200
            assert (await gateway.http.post(f"{prefix}{CHAT}", json=chat_body())).status_code == 401
            headers = {"authorization": "Bearer secret"}
            assert (await gateway.http.post(f"{prefix}{CHAT}", json=chat_body(), headers=headers)).status_code == 200
        assert (await gateway.http.get("/llmx/health")).status_code in (401, 404)
        page = await gateway.http.get("/llm")
        assert (page.status_code, page.headers["location"]) == (307, "/llm/")
        assert "chat.js" in (await gateway.http.get("/llm/")).text


@pytest.mark.parametrize("text", ["*", "[1]", '"*"', "", "{}"])
def test_lists_are_json(text: str) -> None:
    with pytest.raises(ValueError, match="JSON"):
        Strings.from_json(text)


def test_a_list_shows_itself_as_json() -> None:
    assert str(Strings.from_json('["*", "a"]')) == '["*", "a"]'
