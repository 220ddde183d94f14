"""Adapters as models, with scripted engines: which requests name them, and which engines load them."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from openai import NotFoundError

from proa.engine.v1 import core_pb2, service_pb2
from proa.lora_module import LoraModule
from support.fake_engine import FakeEngine, say
from support.gateway import RunningGateway, chat_body, events_of, running_gateway, until
from support.routing import cached_tokens
from support.scrape import Scrape

FOLDERS = {"/adapters/sql": "d1", "/adapters/sql-2": "d2", "/adapters/law": "d3"}
SQL = LoraModule(name="sql", path="/adapters/sql")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
}


def lora_engine(**settings: Any) -> FakeEngine:
    return FakeEngine(**{"script": say("one two"), "max_loras": 2, "lora_folders": dict(FOLDERS), **settings})


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with lora_engine(loras={"sql": "/adapters/sql"}) as engine:
        yield engine


@pytest.fixture
async def engines() -> AsyncIterator[list[FakeEngine]]:
    """Two engines with adapters in their file systems, of which none is loaded."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(lora_engine()) for _ in range(2)]


async def ask(gateway: RunningGateway, model: str = "sql", **fields: Any) -> Any:
    return await gateway.complete(**{"model": model, "max_tokens": 3, **fields})


def loras_of(engine: FakeEngine) -> list[tuple[str, str]]:
    """Name and content of the adapter of each request that the engine got."""
    return [(request.lora_name, request.lora_digest) for request in engine.requests]


async def test_models_has_an_adapter_with_its_base_model_and_path(engine: FakeEngine) -> None:
    async with running_gateway(engine, lora_modules=(LoraModule(name="law", path="/adapters/law"),)) as gateway:
        models = {model.id: model.to_dict() for model in (await gateway.openai.models.list()).data}
        assert list(models) == ["fake", "law", "sql"]
        assert (models["fake"]["parent"], models["fake"]["root"]) == (None, "fake")
        assert (models["sql"]["parent"], models["sql"]["root"]) == ("fake", "/adapters/sql")
        assert (models["law"]["parent"], models["law"]["root"]) == ("fake", "/adapters/law")
        assert (await gateway.openai.models.retrieve("sql")).to_dict() == models["sql"]


@pytest.mark.parametrize("path", BODIES)
async def test_every_api_takes_an_adapters_name_as_model(engine: FakeEngine, path: str) -> None:
    async with running_gateway(engine) as gateway:
        answer = await gateway.http.post(path, json={**BODIES[path], "model": "sql"})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "sql"
        plain = await gateway.http.post(path, json={**BODIES[path], "model": "fake"})
        assert plain.json()["model"] == "fake"
    assert loras_of(engine) == [("sql", "d1"), ("", "")]


async def test_generate_takes_an_adapter_as_model_or_as_sglangs_lora_path(engine: FakeEngine) -> None:
    async with running_gateway(engine) as gateway:
        for fields in ({"model": "sql"}, {"lora_path": "sql"}, {}):
            answer = await gateway.http.post("/generate", json={"text": "Hi", **fields})
            assert answer.status_code == 200, answer.text
    assert loras_of(engine) == [("sql", "d1"), ("sql", "d1"), ("", "")]


async def test_an_embedding_is_computed_with_an_adapter() -> None:
    tasks = (core_pb2.POOLING_TASK_EMBED,)
    async with lora_engine(loras={"sql": "/adapters/sql"}, pooling_tasks=tasks) as engine:
        async with running_gateway(engine) as gateway:
            answer = await gateway.openai.embeddings.create(model="sql", input="Hi")
            assert answer.model == "sql"
        assert loras_of(engine) == [("sql", "d1")]


async def test_tokenizer_and_chat_template_are_the_base_models(engine: FakeEngine) -> None:
    async with running_gateway(engine) as gateway:
        tokens = [
            (await gateway.http.post("/tokenize", json=chat_body(model=model))).json() for model in ("sql", "fake")
        ]
        assert tokens[0] == tokens[1]
        assert tokens[0]["count"] > 0


async def test_an_openai_client_streams_an_adapters_answer(engine: FakeEngine) -> None:
    async with running_gateway(engine) as gateway:
        chunks = [
            chunk
            async for chunk in await gateway.openai.chat.completions.create(
                model="sql", messages=[{"role": "user", "content": "Hi"}], stream=True
            )
        ]
        assert {chunk.model for chunk in chunks} == {"sql"}
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one two"
        with pytest.raises(NotFoundError) as error:
            await gateway.openai.chat.completions.create(model="sq", messages=[{"role": "user", "content": "Hi"}])
        assert (error.value.code, error.value.param) == ("model_not_found", "model")


async def test_requests_go_to_the_engine_that_has_the_adapter(engine: FakeEngine) -> None:
    async with lora_engine() as other, running_gateway(engine, other) as gateway:
        for _ in range(8):
            assert (await ask(gateway)).status_code == 200
    assert (len(engine.requests), other.requests, other.lora_loads) == (8, [], [])


async def test_the_first_requests_load_the_adapter_once_on_one_engine(engines: list[FakeEngine]) -> None:
    for engine in engines:
        engine.lora_gate.clear()
    async with running_gateway(*engines, lora_modules=(SQL,)) as gateway:
        asking = [asyncio.create_task(ask(gateway)) for _ in range(16)]
        await until(lambda: sum(one.load for one in gateway.gateway.pool.engines) == 16)
        for engine in engines:
            engine.lora_gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}
        assert (await ask(gateway)).status_code == 200
    (loading,) = [engine for engine in engines if engine.lora_loads]
    assert [(load.name, load.path) for load in loading.lora_loads] == [("sql", "/adapters/sql")]
    assert loras_of(loading) == [("sql", "d1")] * 17


async def test_a_client_that_leaves_while_the_adapter_loads_does_not_end_the_load(engine: FakeEngine) -> None:
    engine.lora_gate.clear()
    async with running_gateway(engine, lora_modules=(LoraModule(name="law", path="/adapters/law"),)) as gateway:
        leaving, staying = (asyncio.create_task(ask(gateway, "law")) for _ in range(2))
        (client,) = gateway.gateway.pool.engines
        await until(lambda: client.load == 2)
        leaving.cancel()
        await until(lambda: client.load == 1)
        engine.lora_gate.set()
        assert (await staying).status_code == 200
    assert len(engine.lora_loads) == 1


async def test_an_engine_without_the_adapters_folder_is_passed_over(engines: list[FakeEngine]) -> None:
    engines[0].lora_folders.clear()
    async with running_gateway(*engines, lora_modules=(SQL,), routing="round-robin") as gateway:
        for _ in range(4):
            assert (await ask(gateway)).status_code == 200
    assert engines[0].requests == []
    assert len(engines[1].requests) == 4


async def test_an_adapter_that_no_engine_can_load_is_not_found_with_the_reason(engines: list[FakeEngine]) -> None:
    async with running_gateway(*engines, lora_modules=(LoraModule(name="no", path="/adapters/no"),)) as gateway:
        answer = await ask(gateway, "no")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert "there is no adapter at /adapters/no" in answer.json()["error"]["message"]
    assert all(engine.lora_loads for engine in engines)


async def test_engines_without_adapters_are_unavailable_for_them() -> None:
    async with FakeEngine() as engine, running_gateway(engine, lora_modules=(SQL,)) as gateway:
        answer = await ask(gateway)
        assert answer.status_code == 503
        assert "without --enable-lora" in answer.json()["error"]["message"]
        assert (await ask(gateway, "fake")).status_code == 200


async def test_an_engine_without_adapters_gets_only_plain_requests(engine: FakeEngine) -> None:
    async with FakeEngine() as plain, running_gateway(engine, plain, routing="round-robin") as gateway:
        for _ in range(6):
            assert (await ask(gateway)).status_code == 200
    assert (len(engine.requests), plain.requests) == (6, [])


async def test_a_rejected_request_loads_the_adapter_again(engine: FakeEngine) -> None:
    async with running_gateway(engine) as gateway:
        engine.loras.clear()  # and no session is told
        assert (await ask(gateway)).status_code == 200
    assert len(engine.lora_loads) == 1
    assert loras_of(engine) == [("sql", "d1")] * 2


@asynccontextmanager
async def stream_of_a_lost_engine(engines: list[FakeEngine]) -> AsyncIterator[tuple[FakeEngine, AsyncIterator[Any]]]:
    """The other engine and the further events of a stream, of which the engine is lost after the first event."""
    for engine in engines:
        engine.step_delay, engine.script = 0.01, say("one two three", repeat=True)
    async with running_gateway(*engines, lora_modules=(SQL,)) as gateway:
        body = {"model": "sql", "prompt": "Hi", "max_tokens": 100, "stream": True}
        async with gateway.http.stream("POST", "/v1/completions", json=body) as response:
            events = events_of(response)
            await anext(events)
            first, other = sorted(engines, key=lambda engine: not engine.requests)
            await first.stop()
            yield other, events


async def test_a_stream_of_a_lost_engine_continues_with_the_same_adapter(engines: list[FakeEngine]) -> None:
    async with stream_of_a_lost_engine(engines) as (other, events):
        rest = [event async for event in events]
    assert rest[-2]["choices"][0]["finish_reason"] == "length"
    (resumed,) = other.requests
    assert (resumed.lora_name, resumed.lora_digest) == ("sql", "d1")
    assert resumed.resumed_token_ids


async def test_a_stream_does_not_continue_with_other_content(engines: list[FakeEngine]) -> None:
    engines[1].lora_folders["/adapters/sql"] = "other"
    async with stream_of_a_lost_engine(engines) as (other, events):
        rest = [event async for event in events]
    assert rest[-2]["error"]["code"] == "engine_lost"
    assert other.lora_loads
    assert other.requests == []


async def test_cached_blocks_of_an_adapter_are_its_own() -> None:
    rule = service_pb2.CheckpointRule(interval=16)
    prompt = list(range(1, 100))
    loras = {"sql": "/adapters/sql", "law": "/adapters/law"}
    async with lora_engine(checkpoint_rule=rule, loras=loras) as engine, running_gateway(engine) as gateway:
        for model in ("fake", "sql", "law"):
            assert await cached_tokens(gateway, prompt, model=model) == (0, 0)
            assert await cached_tokens(gateway, prompt, model=model) == (96, 96)


async def test_vllms_metrics_have_the_base_model_and_the_others_the_adapter(engine: FakeEngine) -> None:
    async with running_gateway(engine) as gateway:
        await ask(gateway)
        page = Scrape((await gateway.http.get("/metrics")).text)
    assert page.value("vllm:request_success_total", model_name="fake") == 1
    assert page.value("gen_ai_server_request_duration_seconds_count", gen_ai_request_model="sql") == 1
    with pytest.raises(KeyError):
        page.value("vllm:request_success_total", model_name="sql")


async def test_the_access_log_has_the_adapters_name(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="proa_gateway.access_log")
    async with running_gateway(engine, access_log=True) as gateway:
        await ask(gateway)
    (record,) = [each for each in caplog.records if each.name == "proa_gateway.access_log"]
    assert vars(record)["proa_fields"]["model"] == "sql"
