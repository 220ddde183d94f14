"""API keys over HTTP: authentication, rate limits, and the order of service when the gateway is full."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from proa_gateway.admission import auth
from proa_gateway.config import Deadlines
from support.fake_engine import FakeEngine, prompt_ids, say
from support.gateway import RunningGateway, chat_body, events_of, running_gateway, until
from support.otlp import OtlpReceiver
from support.scrape import Scrape

BATCH, SPARE = 8, 1
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(script=say("one two"), max_num_seqs=BATCH) as engine:
        yield engine


def key_file(folder: Path, **keys: dict[str, Any]) -> Path:
    """A file of keys; the key of `team` is `sk-team`."""
    path = folder / "keys.json"
    entries = [{"name": name, "key": f"sk-{name}", **fields} for name, fields in keys.items()]
    path.write_text(json.dumps({"keys": entries}))
    return path


async def ask(gateway: RunningGateway, key: str | None, prompt: Any = "Hi", **fields: Any) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer sk-{key}"}
    body = {"model": "fake", "prompt": prompt, **fields}
    return await gateway.http.post(COMPLETIONS, json=body, headers=headers)


def assert_limited(response: httpx.Response, kind: str) -> None:
    assert response.status_code == 429
    error = response.json()["error"]
    assert (error["type"], error["code"]) == (kind, "rate_limit_exceeded")
    assert int(response.headers["retry-after"]) >= 1


async def test_a_key_of_a_flag_lets_requests_in(engine: FakeEngine) -> None:
    async with running_gateway(engine, api_key=("sk-a", "sk-b")) as gateway:
        statuses = [(await ask(gateway, key, priority=5)).status_code for key in ("a", "b", "c", None)]
        page = Scrape((await gateway.http.get("/metrics")).text)
    assert statuses == [200, 200, 401, 401]
    assert [request.priority for request in engine.requests] == [5, 5]
    assert "proa_gateway_key_requests_total" not in page.names


async def test_without_a_known_key_every_request_is_rejected(engine: FakeEngine, tmp_path: Path) -> None:
    async with running_gateway(engine, api_keys=key_file(tmp_path, a={})) as gateway:
        for headers in ({}, {"authorization": "Bearer sk-b"}, {"authorization": "Basic sk-a"}, {"x-api-key": "sk-b"}):
            for method, path in (
                ("POST", CHAT),
                ("POST", COMPLETIONS),
                ("GET", "/v1/models"),
                ("GET", "/openapi.json"),
                ("GET", "/nothing"),
            ):
                response = await gateway.http.request(method, path, headers=headers, content=b"{not read")
                assert response.status_code == 401
                assert response.headers["www-authenticate"] == "Bearer"
                error = response.json()["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert not engine.requests
        page = Scrape((await gateway.http.get("/metrics")).text)
        assert page.value("proa_gateway_admission_rejections_total", reason="api_key") == 20


async def test_probes_and_scrapers_need_no_key(engine: FakeEngine, tmp_path: Path) -> None:
    async with running_gateway(engine, api_keys=key_file(tmp_path, a={})) as gateway:
        for path in ("/health", "/ping", "/ready", "/load", "/metrics", "/version"):
            assert (await gateway.http.get(path)).status_code == 200


async def test_the_official_client_is_served_with_a_key_and_gets_an_error_without(
    engine: FakeEngine, tmp_path: Path
) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    async with running_gateway(engine, api_keys=key_file(tmp_path, a={"requests_per_minute": 3})) as gateway:
        with pytest.raises(openai.AuthenticationError):
            await gateway.openai.chat.completions.create(model="fake", messages=messages)
        client = gateway.openai.with_options(api_key="sk-a")
        answer = await client.chat.completions.create(model="fake", messages=messages)
        assert answer.choices[0].message.content == "one two"
        chunks = await client.chat.completions.create(model="fake", messages=messages, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices]) == "one two"
        assert [model.id async for model in client.models.list()] == ["fake"]
        await client.chat.completions.create(model="fake", messages=messages)
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="fake", messages=messages)


async def test_requests_per_minute_are_limited_and_headers_show_the_rest(engine: FakeEngine, tmp_path: Path) -> None:
    keys = key_file(tmp_path, a={"requests_per_minute": 2, "tokens_per_minute": 600}, b={})
    async with running_gateway(engine, api_keys=keys) as gateway:
        first = await ask(gateway, "a", max_tokens=5)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-limit-tokens"] == "600"
        assert int(first.headers["x-ratelimit-remaining-tokens"]) < 600
        headers = {"authorization": "Bearer sk-a"}
        async with gateway.http.stream("POST", CHAT, json=chat_body(stream=True), headers=headers) as response:
            assert response.headers["x-ratelimit-remaining-requests"] == "0"
            assert [event async for event in events_of(response)][-1] == "[DONE]"
        refused = await ask(gateway, "a")
        assert_limited(refused, "requests")
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.headers["x-ratelimit-reset-requests"].endswith("s")
        other = await ask(gateway, "b")
        assert other.status_code == 200
        assert not [name for name in other.headers if name.startswith("x-ratelimit")]


async def test_tokens_per_minute_count_prompt_and_output_and_unused_ones_return(
    engine: FakeEngine, tmp_path: Path
) -> None:
    """Prompts of 10 tokens and answers of 3; 100 more are asked for."""
    engine.script = say("a", repeat=True)
    async with running_gateway(engine, api_keys=key_file(tmp_path, a={"tokens_per_minute": 150})) as gateway:
        left = []
        for _ in range(3):
            response = await ask(gateway, "a", [1] * 10, max_tokens=30)
            assert response.status_code == 200
            left.append(int(response.headers["x-ratelimit-remaining-tokens"]))
        assert all(before - after in (37, 38, 39, 40) for before, after in pairwise(left))
        assert_limited(await ask(gateway, "a", [1] * 10, max_tokens=100), "tokens")
        engine.script = say("ab")
        (before, after) = [
            int((await ask(gateway, "a", [1] * 5, max_tokens=15)).headers["x-ratelimit-remaining-tokens"])
            for _ in range(2)
        ]
        assert before - after in range(4, 9)  # 5 and the two letters and an end; a little has refilled


async def test_concurrent_requests_are_limited_until_one_ends_or_its_client_disconnects(
    engine: FakeEngine, tmp_path: Path
) -> None:
    engine.step_delay = None
    async with running_gateway(engine, api_keys=key_file(tmp_path, a={"max_concurrent_requests": 2})) as gateway:
        running = [asyncio.create_task(ask(gateway, "a")) for _ in range(2)]
        await engine.until(lambda engine: engine.num_unfinished == 2)
        assert_limited(await ask(gateway, "a"), "requests")
        running.pop().cancel()
        await engine.until(lambda engine: engine.num_unfinished == 1)
        third = asyncio.create_task(ask(gateway, "a"))
        await engine.until(lambda engine: engine.num_unfinished == 2)
        engine.step_delay = 0.0
        assert [(await task).status_code for task in (*running, third)] == [200, 200]
        assert (await ask(gateway, "a")).status_code == 200


async def test_a_flood_from_one_key_does_not_delay_another_and_shares_follow_weights(
    engine: FakeEngine, tmp_path: Path
) -> None:
    engine.step_delay = None
    keys = key_file(tmp_path, flood={}, few={}, heavy={"weight": 3})
    async with running_gateway(engine, api_keys=keys) as gateway:
        waiting = gateway.gateway.admission.queue
        tasks = [asyncio.create_task(ask(gateway, "flood", [1] * 9, max_tokens=3)) for _ in range(60)]
        await until(lambda: waiting.num_waiting == 60 - BATCH - SPARE)
        tasks += [asyncio.create_task(ask(gateway, "few", [2] * 9, max_tokens=3)) for _ in range(5)]
        tasks += [asyncio.create_task(ask(gateway, "heavy", [3] * 9, max_tokens=3)) for _ in range(30)]
        await until(lambda: waiting.num_waiting == 95 - BATCH - SPARE)
        engine.step_delay = 0.0
        assert {(await task).status_code for task in tasks} == {200}
        order = [prompt_ids(request)[0] for request in engine.requests[BATCH + SPARE :]]
        served = Counter(order[:25])
        assert served[2] == 5
        assert 4 <= served[1] <= 7
        assert 13 <= served[3] <= 16


@pytest.mark.parametrize(
    ("limit", "flood", "reason"),
    [
        ({"max_queued_tokens": 300}, {"prompt": [1] * 30}, "tokens"),
        ({"max_concurrent_requests": 100}, {"n": 10}, "requests"),
        ({"max_waiting_requests": 10}, {}, "waiting"),
    ],
)
async def test_no_bound_lets_one_key_keep_the_others_out(
    engine: FakeEngine, tmp_path: Path, limit: dict[str, Any], flood: dict[str, Any], reason: str
) -> None:
    engine.step_delay = None
    keys = key_file(tmp_path, flood={}, few={}, urgent={"priority": -5})
    async with running_gateway(engine, api_keys=keys, **limit) as gateway:
        waiting = gateway.gateway.admission.queue
        running = [asyncio.create_task(ask(gateway, "flood")) for _ in range(BATCH + SPARE)]
        await engine.until(lambda engine: engine.num_unfinished == BATCH + SPARE)
        floods = [asyncio.create_task(ask(gateway, "flood", **flood)) for _ in range(30)]
        await until(lambda: sum(task.done() for task in floods) + waiting.num_waiting == 30)
        most = waiting.num_waiting
        assert 9 <= most <= 10
        others = [asyncio.create_task(ask(gateway, key, [7] * 9)) for key in ("few", "urgent", "few", "urgent")]
        await until(lambda: sum(task.done() for task in floods) + waiting.num_waiting == 30 + len(others))
        assert not any(task.done() for task in others)
        engine.step_delay = 0.0
        assert {(await task).status_code for task in (*running, *others)} == {200}
        answers = [await task for task in floods]
        refused = [response for response in answers if response.status_code == 429]
        assert len(answers) - len(refused) < most
        assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
        page = Scrape((await gateway.http.get("/metrics")).text)
        assert page.value("proa_gateway_admission_rejections_total", reason=reason) == len(refused)
        bounds = gateway.gateway.admission.bounds
        limits = bounds.sequences, bounds.waiting, bounds.tokens
        await until(lambda: [limit.total for limit in limits] == [0, 0, 0])


async def test_requests_that_wait_for_an_engine_are_evicted_for_an_earlier_priority(tmp_path: Path) -> None:
    deadlines = Deadlines(connect=10, heartbeat=10, shutdown=5, scale_from_zero=20.0)
    keys = key_file(tmp_path, flood={}, urgent={"priority": -5})
    async with running_gateway(
        "127.0.0.1:1",
        ready=False,
        deadlines=deadlines,
        models=("fake", "other"),
        api_keys=keys,
        max_waiting_requests=3,
    ) as gateway:
        waiting = gateway.gateway.admission.queue
        floods = [asyncio.create_task(ask(gateway, "flood")) for _ in range(3)]
        await until(lambda: waiting.num_waiting == 3)
        urgent = asyncio.create_task(ask(gateway, "urgent", model="other"))
        done, held = await asyncio.wait(floods, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result().status_code for task in done] == [429]
        assert not urgent.done()
        waiting.close()
        assert {(await task).status_code for task in (*held, urgent)} == {503}


async def test_a_keys_priority_comes_first_and_a_requests_own_orders_one_keys_requests(
    engine: FakeEngine, tmp_path: Path
) -> None:
    engine.step_delay = None
    keys = key_file(tmp_path, batch={"priority": 10}, chat={"priority": -1})
    async with running_gateway(engine, api_keys=keys) as gateway:
        waiting = gateway.gateway.admission.queue
        tasks = [asyncio.create_task(ask(gateway, "batch", [1])) for _ in range(BATCH + SPARE)]
        await engine.until(lambda engine: engine.num_unfinished == BATCH + SPARE)
        for name, prompt, priority in (
            ("batch", [2], 0),
            ("batch", [3], -100),
            ("chat", [4], 50),
            ("chat", [5], 0),
        ):
            count = waiting.num_waiting
            tasks.append(asyncio.create_task(ask(gateway, name, prompt, priority=priority)))
            await until(lambda count=count: waiting.num_waiting == count + 1)  # type: ignore[misc]
        engine.step_delay = 0.0
        await asyncio.gather(*tasks)
        last = engine.requests[-4:]
        assert [prompt_ids(request)[0] for request in last] == [5, 4, 3, 2]
        assert [request.priority for request in last] == [-1, -1, 10, 10]


async def test_a_rotated_key_is_valid_at_once_and_the_old_one_is_not(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "POLL_INTERVAL", 0.02)
    async with running_gateway(engine, api_keys=key_file(tmp_path, a={})) as gateway:
        assert (await ask(gateway, "a")).status_code == 200
        key_file(tmp_path, b={})
        async with asyncio.timeout(10):
            while (await ask(gateway, "b")).status_code == 401:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (await ask(gateway, "a")).status_code == 401
        (tmp_path / "keys.json").write_text("{")
        await asyncio.sleep(0.2)
        assert (await ask(gateway, "b")).status_code == 200


async def test_metrics_and_traces_show_the_name_of_a_key_and_never_the_key(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OtlpReceiver() as receiver:
        for name, value in receiver.environment.items():
            monkeypatch.setenv(name, value)
        keys = key_file(tmp_path, team={"requests_per_minute": 1})
        async with running_gateway(engine, api_keys=keys) as gateway:
            await ask(gateway, "team", [1] * 10)
            await ask(gateway, "team")
            text = (await gateway.http.get("/metrics")).text
        page = Scrape(text)
        assert page.value("proa_gateway_key_requests_total", key="team", status="200") == 1
        assert page.value("proa_gateway_key_requests_total", key="team", status="429") == 1
        assert page.value("proa_gateway_key_tokens_total", key="team", type="input") == 10
        assert page.value("proa_gateway_key_tokens_total", key="team", type="output") == 3
        assert page.value("proa_gateway_admission_rejections_total", reason="rate_limit") == 1
        assert "sk-team" not in text
        servers = [span for span in receiver.spans if span.kind == "SERVER"]
        assert [span.attributes["proa.api_key.name"] for span in servers] == ["team", "team"]
        assert "sk-team" not in repr(receiver.spans)


async def test_keys_with_separate_prefix_caches_send_different_salts(engine: FakeEngine) -> None:
    async with running_gateway(engine, api_key=("sk-a", "sk-b"), separate_prefix_caches=True) as gateway:
        for key in ("a", "a", "b"):
            assert (await ask(gateway, key)).status_code == 200
    first, again, other = (request.cache_salt for request in engine.requests)
    assert first == again != other
    assert "sk-" not in first


async def test_engines_learn_which_requests_are_of_one_key_but_not_its_name(engine: FakeEngine) -> None:
    async with running_gateway(engine, api_key=("sk-a", "sk-b")) as gateway:
        for key in ("a", "a", "b"):
            assert (await ask(gateway, key)).status_code == 200
    async with running_gateway(engine) as gateway:
        assert (await ask(gateway, "anything")).status_code == 200
    first, again, other, without = (request.tenant for request in engine.requests)
    assert first == again != other
    assert first
    assert other
    assert not without
    assert "sk-" not in first
