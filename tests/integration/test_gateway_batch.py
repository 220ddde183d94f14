"""Batches against a gateway with a scripted engine."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest

from proa.engine.v1.core_pb2 import POOLING_TASK_EMBED, POOLING_TASK_TOKEN_LOGPROBS
from proa_gateway.batch import run as batch_client_module
from proa_gateway.batch.files import Answered, open_output
from proa_gateway.batch.run import GatewayUnreachable, Progress, batch_client, run_batch
from support.fake_engine import FakeEngine, say
from support.gateway import chat_body, running_gateway
from support.processes import free_port

CHAT, HI = "/v1/chat/completions", [{"role": "user", "content": "Hi"}]


def line(custom_id: str, url: str = CHAT, body: Any = None) -> bytes:
    fields = {"custom_id": custom_id, "method": "POST", "url": url, "body": body or chat_body()}
    return json.dumps(fields).encode() + b"\n"


async def run(port: int, source: list[bytes], *, key: str | None = None, limit: int = 4) -> tuple[Progress, list[Any]]:
    output, progress = io.BytesIO(), Progress()
    async with batch_client(f"http://127.0.0.1:{port}/", key, limit) as client:
        await run_batch(source, output, Answered(), client, progress, max_concurrency=limit)
    return progress, [json.loads(each) for each in output.getvalue().splitlines()]


async def test_every_generation_endpoint_answers_a_line() -> None:
    source = [
        line("chat"),
        line("text", "/v1/completions", {"prompt": "Hi"}),
        line("message", "/v1/messages", {"model": "fake", "max_tokens": 9, "messages": HI}),
        line("native", "/generate", {"text": "Hi"}),
        line("tokens", "/tokenize", {"prompt": "Hi"}),
    ]
    async with FakeEngine(script=say("one two")) as engine, running_gateway(engine) as gateway:
        progress, outputs = await run(gateway.port, source)
    bodies = {each["custom_id"]: each["response"]["body"] for each in outputs}
    assert bodies["chat"]["choices"][0]["message"]["content"] == "one two"
    assert bodies["text"]["choices"][0]["text"] == "one two"
    assert bodies["message"]["content"][0]["text"] == "one two"
    assert bodies["native"]["text"] == "one two"
    assert bodies["tokens"]["tokens"]
    assert all(each["response"]["request_id"] and each["error"] is None for each in outputs)
    assert (progress.num_done, progress.num_failed) == (5, 0)
    counts = [bodies["chat"]["usage"]["completion_tokens"], bodies["text"]["usage"]["completion_tokens"]]
    assert progress.num_tokens == sum(counts) + bodies["message"]["usage"]["output_tokens"] + counts[1]


async def test_pooling_endpoints_answer_a_line() -> None:
    source = [
        line("embeddings", "/v1/embeddings", {"input": ["a", "b"]}),
        line("score", "/v1/score", {"text_1": "a", "text_2": ["a", "b"]}),
        line("rerank", "/v1/rerank", {"query": "a", "documents": ["b", "a"]}),
    ]
    async with FakeEngine(pooling_tasks=(POOLING_TASK_EMBED,)) as engine, running_gateway(engine) as gateway:
        progress, outputs = await run(gateway.port, source)
    bodies = {each["custom_id"]: each["response"]["body"] for each in outputs}
    assert len(bodies["embeddings"]["data"]) == 2
    assert bodies["score"]["data"][0]["score"] == pytest.approx(1)
    assert [each["index"] for each in bodies["rerank"]["results"]] == [1, 0]
    assert (progress.num_done, progress.num_failed, progress.num_tokens) == (3, 0, 0)


async def test_decisions_answer_a_line() -> None:
    predicate = {"type": "predicate", "instructions": "Is it late?"}
    noul = {"type": "noul", "instructions": "Is it late?"}
    source = [
        line("list", "/v1/decisions", {"input": "Hi", "questions": [predicate]}),
        line("map", "/v1/systemone", {"state": "Hi", "questions": {"late": noul}}),
    ]
    async with FakeEngine(pooling_tasks=(POOLING_TASK_TOKEN_LOGPROBS,)) as engine, running_gateway(engine) as gateway:
        progress, outputs = await run(gateway.port, source)
    bodies = {each["custom_id"]: each["response"]["body"] for each in outputs}
    assert bodies["list"]["answers"][0]["probability"] == bodies["map"]["answers"]["late"]["noul"]
    assert (progress.num_done, progress.num_failed, progress.num_tokens) == (2, 0, 0)


async def test_a_line_that_fails_leaves_the_others() -> None:
    source = [b"{\n", line("a"), line("a"), line("b", "/no/such"), line("c", body={"messages": []}), line("d")]
    async with FakeEngine(script=say("one")) as engine, running_gateway(engine) as gateway:
        progress, outputs = await run(gateway.port, source)
    statuses = {each["custom_id"]: each["response"]["status_code"] for each in outputs if each["response"]}
    assert statuses == {"a": 200, "b": 404, "c": 400, "d": 200}
    assert {each["error"]["code"] for each in outputs if each["error"]} == {"invalid_json", "duplicate_custom_id"}
    assert (progress.num_done, progress.num_failed) == (6, 4)


async def test_no_more_requests_than_the_limit_run_at_once() -> None:
    async with FakeEngine(script=say("one"), step_delay=None) as engine, running_gateway(engine) as gateway:
        running = asyncio.create_task(run(gateway.port, [line(str(index)) for index in range(7)], limit=3))
        await engine.until(lambda engine: engine.num_unfinished == 3)
        await asyncio.sleep(0.1)
        assert engine.num_unfinished == 3
        engine.step_delay = 0.0
        await engine.step()
        progress, outputs = await running
    assert progress.num_done == len(outputs) == 7


async def test_a_later_run_sends_only_what_has_no_response(tmp_path: Path) -> None:
    path, source = tmp_path / "out.jsonl", [b"{\n", line("a"), line("b"), line("c")]
    async with FakeEngine(script=say("one")) as engine, running_gateway(engine) as gateway:
        url = f"http://127.0.0.1:{gateway.port}"
        for count in (2, 4, 4):
            progress = Progress()
            with open_output(path) as (output, answered):
                async with batch_client(url, None, 4) as client:
                    await run_batch(source[:count], output, answered, client, progress, max_concurrency=4)
        assert len(engine.requests) == 3
    assert (progress.num_done, progress.num_skipped) == (0, 4)
    outputs = [json.loads(each) for each in path.read_bytes().splitlines()]
    assert sorted(each["custom_id"] or "" for each in outputs) == ["", "a", "b", "c"]


async def test_a_request_over_a_limit_is_sent_again(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"keys": [{"name": "a", "key": "secret", "requests_per_minute": 120}]}')
    async with (
        FakeEngine(script=say("one"), step_delay=0.05) as engine,
        running_gateway(engine, max_concurrent_requests=1, api_keys=keys) as gateway,
    ):
        progress, _ = await run(gateway.port, [line("a"), line("b")], key="secret")
    assert (progress.num_done, progress.num_failed) == (2, 0)


async def test_a_batch_without_a_gateway_ends_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_client_module, "MAX_ATTEMPTS", 1)
    with pytest.raises(GatewayUnreachable):
        await run(free_port(), [line("a"), line("b")])
