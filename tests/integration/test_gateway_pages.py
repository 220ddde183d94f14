"""What the gateway serves and writes beside the API: the chat page, and the access log."""

import json
import logging
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from proa.engine.v1 import core_pb2
from proa.logs import make_handler
from support.fake_engine import FakeEngine, Reply, say
from support.gateway import chat_body, running_gateway, until
from support.scrape import Scrape

CHAT = "/v1/chat/completions"


async def test_the_page_needs_no_key_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"keys": [{"name": "a", "key": "secret"}]}')
    wanted, loaded = ["/"], {}
    async with FakeEngine(script=say("one")) as engine, running_gateway(engine, api_keys=keys) as gateway:
        while wanted:
            path = wanted.pop()
            loaded[path] = response = await gateway.http.get(path)
            names = re.findall(r"""(?:src="|rel="stylesheet" href="|from "\./|import\("\./)([^"]+)""", response.text)
            wanted += {f"/{name}" for name in names} - loaded.keys()
    assert {"/chat.css", "/chat.js", "/api.js", "/markdown.js", "/store.js", "/highlight.min.js"} < loaded.keys()
    kinds = {"": "text/html", ".css": "text/css", ".js": "text/javascript"}
    for path, response in loaded.items():
        assert response.status_code == 200, path
        assert response.headers["content-type"] == f"{kinds[Path(path).suffix]}; charset=utf-8"
        assert response.headers["content-security-policy"].startswith("default-src 'self'")
        if path == "/highlight.min.js":  # a library, of which the page uses what returns text
            continue
        assert "innerHTML" not in response.text
        assert "http:" not in response.text
        assert "https:" not in response.text


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
async def test_the_pages_of_the_api_load_nothing_from_elsewhere(path: str) -> None:
    async with FakeEngine() as engine, running_gateway(engine, root_path="/proa") as gateway:
        page = await gateway.http.get(f"/proa{path}")
        assets = re.findall(r"""(?:src|href)=["']([^"']+)""", page.text)
        statuses = [(await gateway.http.get(asset)).status_code for asset in assets]
    assert len(assets) >= 2
    assert all(asset.startswith("/proa/") for asset in assets)
    assert set(statuses) == {200}


@pytest.fixture
def access_log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="proa_gateway.access_log")
    return caplog


def lines_of(log: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(each)["proa_fields"] for each in log.records if each.name == "proa_gateway.access_log"]


async def test_the_access_log_has_a_line_for_each_request_but_not_for_probes(
    access_log: pytest.LogCaptureFixture,
) -> None:
    async with FakeEngine(script=say("one two")) as engine, running_gateway(engine, access_log=True) as gateway:
        await gateway.http.get("/health")
        await gateway.http.get("/metrics")
        await gateway.http.post(CHAT, json=chat_body(), headers={"x-request-id": "a", "user-agent": "test"})
        await gateway.events(CHAT, chat_body())
        await gateway.http.post(CHAT, json={"model": "fake"})
        await gateway.http.get("/nothing")
    answer, stream, refused, unknown = lines_of(access_log)
    assert {name: answer[name] for name in ("method", "path", "status", "complete", "request_id", "user_agent")} == {
        "method": "POST",
        "path": CHAT,
        "status": 200,
        "complete": True,
        "request_id": "a",
        "user_agent": "test",
    }
    assert answer["client"] == "127.0.0.1"
    assert "key" not in answer
    assert (stream["status"], stream["complete"]) == (200, True)
    assert (refused["status"], unknown["status"]) == (400, 404)


async def test_probes_under_a_root_path_are_not_logged(access_log: pytest.LogCaptureFixture) -> None:
    async with FakeEngine() as engine, running_gateway(engine, access_log=True, root_path="/llm") as gateway:
        for path in ("/health", "/llm/health", "/ready", "/llm/ready", "/llm/metrics", "/llm/nothing"):
            await gateway.http.get(path)
    (line,) = lines_of(access_log)
    assert (line["path"], line["status"]) == ("/llm/nothing", 404)


async def test_probes_that_fail_are_not_logged(access_log: pytest.LogCaptureFixture) -> None:
    async with running_gateway(access_log=True) as gateway:  # without engines
        assert (await gateway.http.get("/ready")).status_code == 503
    assert lines_of(access_log) == []


async def test_a_stream_that_fails_is_logged_as_incomplete_with_its_error(
    access_log: pytest.LogCaptureFixture,
) -> None:
    reply = Reply([5, 5], finish_reason=core_pb2.FINISH_REASON_ERROR, error="the output left its grammar")
    async with FakeEngine(script=lambda _: reply) as engine, running_gateway(engine, access_log=True) as gateway:
        await gateway.events(CHAT, chat_body())
        await gateway.http.post(CHAT, json={"model": "fake"})
        metrics = Scrape((await gateway.http.get("/metrics")).text)
    stream, refused = lines_of(access_log)
    assert (stream["status"], stream["complete"], stream["error_type"]) == (200, False, "grammar_failed")
    assert (refused["status"], refused["complete"], refused["error_type"]) == (
        400,
        True,
        "missing_required_parameter",
    )
    failed = {"status": "200", "error_type": "grammar_failed"}
    assert metrics.value("proa_gateway_requests_total", route=CHAT, **failed) == 1  # what the dashboard shows


async def test_a_client_that_leaves_is_logged_as_incomplete(access_log: pytest.LogCaptureFixture) -> None:
    script = say("one", repeat=True)
    async with FakeEngine(script=script) as engine, running_gateway(engine, access_log=True) as gateway:
        async with gateway.http.stream("POST", CHAT, json=chat_body(stream=True, max_tokens=2000)):
            pass
        await until(lambda: bool(lines_of(access_log)))
    (line,) = lines_of(access_log)
    assert line["complete"] is False


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_of_a_trace_is_answered_and_logged_with_its_id(
    access_log: pytest.LogCaptureFixture, stream: bool
) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    async with FakeEngine(script=say("one")) as engine, running_gateway(engine, access_log=True) as gateway:
        traced = await gateway.http.post(CHAT, json=chat_body(stream=stream), headers=headers)
        failed = await gateway.http.post(CHAT, json=chat_body(model="other"), headers=headers)
        other = await gateway.chat(stream=stream)
    assert (traced.headers["x-trace-id"], failed.headers["x-trace-id"]) == (trace_id, trace_id)
    assert "x-trace-id" not in other.headers
    assert [line.get("trace_id") for line in lines_of(access_log)] == [trace_id, trace_id, None]


async def test_the_access_log_has_tokens_and_times_of_what_engines_did(access_log: pytest.LogCaptureFixture) -> None:
    async with FakeEngine(script=say("one two")) as engine, running_gateway(engine, access_log=True) as gateway:
        await gateway.events(CHAT, chat_body(max_tokens=2))
        await gateway.http.post(CHAT, json=chat_body(max_tokens=1, n=2))
        await gateway.chat(model="other")
        await gateway.http.get("/v1/models")
    stream, answer, refused, listed = lines_of(access_log)
    assert (stream["stream"], answer["stream"], refused["stream"]) == (True, False, False)
    assert (stream["finish_reason"], stream["output_tokens"]) == ("length", 2)
    assert answer["output_tokens"] == 2
    assert stream["prompt_tokens"] == answer["prompt_tokens"] > 0
    assert stream["cached_tokens"] == 0
    assert 0 < stream["first_token_ms"] <= stream["duration_ms"]
    assert (refused["model"], refused["error_type"], refused["output_tokens"]) == ("other", "model_not_found", 0)
    assert "first_token_ms" not in refused
    assert "output_tokens" not in listed


async def test_every_field_of_the_access_log_is_documented(
    access_log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"keys": [{"name": "team", "key": "secret"}]}')
    headers = {"authorization": "Bearer secret", "traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
    async with (
        FakeEngine(script=say("one"), num_gpu_blocks=20) as engine,
        running_gateway(
            engine, access_log=True, api_keys=keys, session_admission="wait", session_max_wait=0.01
        ) as gateway,
    ):
        for body in (chat_body(max_tokens=1), {"model": "fake"}):
            await gateway.http.post(CHAT, json=body, headers=headers)
        for token, length in ((7, 50), (8, 50), (7, 200), (8, 200)):  # two conversations, of which one has to wait
            body = {"prompt": [token] * length, "max_tokens": 1}
            await gateway.http.post("/v1/completions", json=body, headers=headers)
    page = (Path(__file__).parents[2] / "docs" / "logs.md").read_text().partition("\n## Access log\n")[2]
    cells = " ".join(re.findall(r"^\| ([^|]+) \|", page, re.M))
    assert set(re.findall(r"`(\w+)`", cells)) == {name for line in lines_of(access_log) for name in line}


async def test_a_wrong_key_is_logged_as_such_and_no_key_is_in_the_log(access_log: pytest.LogCaptureFixture) -> None:
    async with FakeEngine() as engine, running_gateway(engine, access_log=True, api_key=("right",)) as gateway:
        for key in ("wrong", "right"):
            await gateway.http.get(f"/v1/models?key={key}", headers={"authorization": f"Bearer {key}"})
    refused, listed = lines_of(access_log)
    assert (refused["status"], refused["error_type"], refused["path"]) == (401, "invalid_api_key", "/v1/models")
    assert listed["status"] == 200
    assert not [each for each in access_log.records if "right" in str(vars(each)) or "wrong" in str(vars(each))]


async def test_messages_about_a_request_have_its_ids() -> None:
    async with FakeEngine(script=say("one")) as engine, running_gateway(engine) as gateway:
        stream = StringIO()
        handler = make_handler("json", stream, "gateway")
        logging.getLogger("proa_gateway").addHandler(handler)
        try:
            await gateway.http.post(CHAT, json=chat_body(nonsense=1), headers={"x-request-id": "a"})
        finally:
            logging.getLogger("proa_gateway").removeHandler(handler)
    records = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [record["request_id"] for record in records if "nonsense" in record["message"]] == ["a"]


async def test_without_the_flag_nothing_is_logged(access_log: pytest.LogCaptureFixture) -> None:
    async with FakeEngine(script=say("one")) as engine, running_gateway(engine) as gateway:
        await gateway.http.post(CHAT, json=chat_body())
    assert not lines_of(access_log)
