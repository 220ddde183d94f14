"""The operators' endpoints over HTTP, gRPC and the built-in model."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proa.contract import ModelInfo
from proa.options import MASK
from proa_engine.builtin import builtin_model_folder
from proa_engine.config import EngineConfig
from proa_engine.executor import make_executor
from proa_gateway.engines.client import THRESHOLD, BreakerState
from support.engine_server import RunningServer, running_server
from support.fake_engine import FakeEngine
from support.full_values import full
from support.gateway import PATIENT, RunningGateway, chat_body, running_gateway, until

JSON = {"content-type": "application/json"}
ROUTES = [
    ("POST", "/reset_prefix_cache"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("GET", "/server_info"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """An engine with the built-in model, which it serves as `fake`."""
    config = EngineConfig(model="builtin", device="cpu", max_num_seqs=8, kv_cache_memory_bytes=16 * 2**20)
    executor = make_executor(config, lambda text: None)
    with running_server(executor, tokenizer_folder=builtin_model_folder()) as server:
        yield server


@pytest.fixture
async def gateway(server: RunningServer) -> AsyncIterator[RunningGateway]:
    async with running_gateway(f"127.0.0.1:{server.port}", enable_dev_endpoints=True) as gateway:
        yield gateway


async def post(gateway: RunningGateway, path: str, **params: Any) -> None:
    answer = await gateway.http.post(path, params=params, headers=JSON)
    assert (answer.status_code, answer.content) == (200, b""), answer.text


async def ask(gateway: RunningGateway, text: str = "What is the capital of France?") -> dict[str, Any]:
    answer = await gateway.chat(text, temperature=0)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def text_of(body: dict[str, Any]) -> str:
    text: str = body["choices"][0]["message"]["content"]
    return text


async def is_sleeping(gateway: RunningGateway) -> bool:
    sleeping: bool = (await gateway.http.get("/is_sleeping")).json()["is_sleeping"]
    return sleeping


async def test_a_reset_empties_the_prefix_cache_and_the_gateways_index(gateway: RunningGateway) -> None:
    index = gateway.gateway.router.index
    await ask(gateway)
    await until(lambda: index.num_blocks > 0)
    await post(gateway, "/reset_prefix_cache")
    await until(lambda: index.num_blocks == 0)
    assert (await ask(gateway))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_all_engines_are_reset_with_one_time() -> None:
    """An engine fetches no blocks from one that was reset earlier than itself."""
    async with (
        FakeEngine() as one,
        FakeEngine() as two,
        running_gateway(one, two, enable_dev_endpoints=True) as gateway,
    ):
        before = time.time()
        await post(gateway, "/reset_prefix_cache")
        assert one.resets == two.resets
        assert before <= one.resets[0] <= time.time()


@pytest.mark.parametrize("level", [1, 2])
async def test_a_model_that_slept_gives_the_same_answer(gateway: RunningGateway, level: int) -> None:
    before = text_of(await ask(gateway))
    await post(gateway, "/sleep", level=level)
    assert await is_sleeping(gateway)
    await post(gateway, "/sleep", level=level)
    await post(gateway, "/wake_up")
    assert not await is_sleeping(gateway)
    await until(lambda: gateway.gateway.pool.ready)
    assert text_of(await ask(gateway)) == before == "The capital of France is Paris."


async def test_requests_for_a_model_that_sleeps_get_503(gateway: RunningGateway) -> None:
    await post(gateway, "/sleep", model="fake")
    await until(lambda: not gateway.gateway.pool.ready)
    for _ in range(THRESHOLD + 1):
        assert (await gateway.chat()).status_code == 503
    assert (await gateway.http.get("/ready")).status_code == 503
    await post(gateway, "/wake_up", tags=["weights", "kv_cache"])
    await until(lambda: gateway.gateway.pool.ready)
    assert [engine.breaker_state for engine in gateway.gateway.pool.engines] == [BreakerState.CLOSED]


async def test_requests_wait_for_a_sleeping_model_if_the_gateway_scales_from_zero(server: RunningServer) -> None:
    deadlines = replace(PATIENT, scale_from_zero=30.0)
    async with running_gateway(f"127.0.0.1:{server.port}", enable_dev_endpoints=True, deadlines=deadlines) as gateway:
        await post(gateway, "/sleep")
        await until(lambda: not gateway.gateway.pool.ready)
        waiting = asyncio.create_task(ask(gateway))
        await until(lambda: gateway.gateway.admission.queue.num_waiting)
        await post(gateway, "/wake_up")
        assert text_of(await waiting) == "The capital of France is Paris."


async def test_sleep_aborts_running_requests_or_waits_for_them(gateway: RunningGateway) -> None:
    for mode, reason in (("abort", "abort"), ("wait", "length")):
        body = chat_body(stream=True, max_tokens=1000 if mode == "abort" else 60, ignore_eos=True)
        async with gateway.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            sleeping = asyncio.create_task(post(gateway, "/sleep", mode=mode))
            events = [line.removeprefix("data: ") async for line in lines if line and "[DONE]" not in line]
        await sleeping
        assert json.loads(events[-1])["choices"][0]["finish_reason"] == reason
        await post(gateway, "/wake_up")
        await until(lambda: gateway.gateway.pool.ready)


async def test_server_info_has_the_options_of_gateway_and_engines(
    gateway: RunningGateway, server: RunningServer
) -> None:
    info = (await gateway.http.get("/server_info")).json()
    assert info["config"]["enable_dev_endpoints"] is True
    (engine,) = info["engines"].values()
    assert engine["model_info"]["model_name"] == "fake"
    assert engine["config"]["max_num_batched_tokens"] == 64


async def test_server_info_shows_all_that_an_engine_may_have(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    (engine,) = gateway.gateway.pool.engines
    assert engine.hello is not None
    monkeypatch.setattr(engine, "hello", replace(engine.hello, model=full(ModelInfo)))
    answer = await gateway.http.get("/server_info")
    assert answer.status_code == 200, answer.text
    (info,) = answer.json()["engines"].values()
    assert info["model_info"]["kv_transfer"] == {"fingerprint": "80ff", "ports": [7], "block_bytes": 7}
    assert info["model_info"]["images"]["token"] == "é\x00", "it is no secret"


@pytest.mark.parametrize(
    ("path", "params", "param"),
    [
        ("/sleep", {"level": 3}, "level"),
        ("/sleep", {"mode": "keep"}, "mode"),
        ("/wake_up", {"tags": "weights"}, "tags"),
        ("/reset_prefix_cache", {"reset_running_requests": True}, "reset_running_requests"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    gateway: RunningGateway, path: str, params: dict[str, Any], param: str
) -> None:
    answer = await gateway.http.post(path, params=params, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_a_model_that_no_engine_serves_is_not_found(gateway: RunningGateway) -> None:
    for method, path in ROUTES:
        answer = await gateway.http.request(method, path, params={"model": "other"}, headers=JSON)
        assert answer.status_code == 404


async def test_operators_endpoints_need_their_flag_and_an_operators_key(server: RunningServer, tmp_path: Path) -> None:
    address = f"127.0.0.1:{server.port}"
    async with running_gateway(address) as gateway:
        for method, path in ROUTES:
            assert (await gateway.http.request(method, path)).status_code == 404
    keys = tmp_path / "keys.json"
    keys.write_text(
        json.dumps({"keys": [{"name": "a", "key": "sk-a"}, {"name": "b", "key": "sk-b", "role": "operator"}]})
    )
    async with running_gateway(address, api_keys=keys, operator_key=("sk-c",), enable_dev_endpoints=True) as gateway:
        for method, path in ROUTES:
            assert (await gateway.http.request(method, path)).status_code == 401
            user = await gateway.http.request(method, path, headers={"authorization": "Bearer sk-a"})
            assert (user.status_code, user.json()["error"]["code"]) == (403, "insufficient_permissions")
        for key in ("sk-b", "sk-c"):
            answer = await gateway.http.get("/server_info", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200


async def test_no_page_error_or_log_shows_an_api_key(
    server: RunningServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": "a", "key": "sk-in-file", "role": "operator"}]}))
    flags = ("sk-first", "sk-second")
    settings: dict[str, Any] = {"api_keys": keys, "operator_key": flags, "enable_dev_endpoints": True}
    async with running_gateway(f"127.0.0.1:{server.port}", access_log=True, **settings) as gateway:
        shown = [repr(gateway.gateway.config)]
        for key in (*flags, "sk-in-file"):
            gateway.http.headers["authorization"] = f"Bearer {key}"
            for path in ("/server_info", "/metrics", "/openapi.json", "/v1/models"):
                answer = await gateway.http.get(path)
                assert answer.status_code == 200
                shown.append(answer.text + str(answer.headers))
            shown.append((await gateway.http.get(f"/v1/models/none?api_key={key}")).text)
            shown.append((await gateway.chat(temperature="hot")).text)
            shown.append((await gateway.chat()).text)
        assert (await gateway.http.get("/server_info")).json()["config"]["operator_key"] == [MASK, MASK]
    # The client's own log lines have the address that it asks for.
    own = [record for record in caplog.records if record.name.startswith(("proa", "uvicorn"))]
    shown += [f"{record.getMessage()} {vars(record)}" for record in own]
    assert any("'path': '/v1/chat/completions'" in text for text in shown)
    for text in shown:
        for secret in ("sk-in-file", *flags):
            assert secret not in text


async def test_without_engines_operators_endpoints_are_unavailable() -> None:
    async with running_gateway("127.0.0.1:1", ready=False, enable_dev_endpoints=True) as gateway:
        for method, path in ROUTES:
            assert (await gateway.http.request(method, path, headers=JSON)).status_code == 503
