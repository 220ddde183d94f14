"""Loading and unloading adapters while the gateway runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from proa.lora_module import LoraModule
from support.fake_engine import FakeEngine, say
from support.gateway import RunningGateway, events_of, running_gateway, until

FOLDERS = {"/adapters/sql": "d1", "/adapters/sql-2": "d2"}


@pytest.fixture
async def engines() -> AsyncIterator[list[FakeEngine]]:
    async with AsyncExitStack() as stack:
        made = [FakeEngine(script=say("one two"), max_loras=2, lora_folders=dict(FOLDERS)) for _ in range(3)]
        yield [await stack.enter_async_context(engine) for engine in made]


@pytest.fixture
async def gateway(engines: list[FakeEngine]) -> AsyncIterator[RunningGateway]:
    async with running_gateway(*engines, enable_runtime_lora_updating=True) as gateway:
        yield gateway


async def load(
    gateway: RunningGateway, name: str = "sql", path: str = "/adapters/sql", **fields: Any
) -> httpx.Response:
    body = {"lora_name": name, "lora_path": path, **fields}
    return await gateway.http.post("/v1/load_lora_adapter", json=body)


async def unload(gateway: RunningGateway, name: str = "sql") -> httpx.Response:
    return await gateway.http.post("/v1/unload_lora_adapter", json={"lora_name": name})


async def ask(gateway: RunningGateway) -> httpx.Response:
    return await gateway.complete(model="sql", max_tokens=3)


def failure(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


async def test_a_loaded_adapter_is_on_all_engines_until_it_is_unloaded(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    assert (await ask(gateway)).status_code == 404
    answer = await load(gateway)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert [list(engine.loras) for engine in engines] == [["sql"]] * 3
    assert (await ask(gateway)).status_code == 200
    answer = await unload(gateway)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert [list(engine.loras) for engine in engines] == [[]] * 3
    assert (await ask(gateway)).status_code == 404


async def test_faults_have_vllms_statuses_and_texts(gateway: RunningGateway) -> None:
    assert failure(await load(gateway, "", "")) == (400, "Both 'lora_name' and 'lora_path' must be provided.")
    assert failure(await unload(gateway, "")) == (400, "'lora_name' needs to be provided to unload a LoRA adapter.")
    assert failure(await unload(gateway)) == (404, "The lora adapter 'sql' cannot be found.")
    assert (await load(gateway)).status_code == 200
    for path in FOLDERS:
        assert failure(await load(gateway, path=path)) == (
            400,
            "The lora adapter 'sql' has already been loaded. "
            "If you want to load the adapter in place, set 'load_inplace' to True.",
        )
    status, message = failure(await load(gateway, "law", "/adapters/law"))
    assert (status, "there is no adapter at /adapters/law" in message) == (404, True)
    assert failure(await load(gateway, "fake"))[0] == 400


async def test_an_adapter_is_replaced_in_place_while_requests_arrive(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    assert (await load(gateway)).status_code == 200
    replaced = False

    async def client() -> list[int]:
        statuses = []
        while not replaced:
            statuses.append((await ask(gateway)).status_code)
        return [*statuses, (await ask(gateway)).status_code]

    clients = [asyncio.create_task(client()) for _ in range(8)]
    assert (await load(gateway, path="/adapters/sql-2", load_inplace=True)).status_code == 200
    replaced = True
    statuses = await asyncio.gather(*clients)
    assert {status for each in statuses for status in each} == {200}
    assert [engine.loras["sql"].digest for engine in engines] == ["d2"] * 3
    assert {request.lora_digest for engine in engines for request in engine.requests} <= {"d1", "d2"}
    before = sum(len(engine.requests) for engine in engines)
    await ask(gateway)
    last = [request for engine in engines for request in engine.requests if request.lora_digest == "d2"]
    assert len(last) >= 1
    assert sum(len(engine.requests) for engine in engines) == before + 1


async def test_a_load_that_some_engines_refuse_names_them_and_can_be_repeated(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    last = max(engines, key=lambda engine: engine.address)
    del last.lora_folders["/adapters/sql"]
    status, message = failure(await load(gateway))
    assert status == 503
    assert f"was loaded by 2 of 3 engines. Engine {last.address} did not load" in message
    assert (await ask(gateway)).status_code == 200
    last.lora_folders["/adapters/sql"] = "d1"
    assert (await load(gateway)).status_code == 200
    assert "sql" in last.loras


async def test_an_adapters_name_cannot_be_taken_by_another_model() -> None:
    options: dict[str, Any] = {"script": say("one"), "max_loras": 2, "lora_folders": dict(FOLDERS)}
    async with FakeEngine(model_name="a", **options) as one, FakeEngine(model_name="b", **options) as other:
        async with running_gateway(one, other, enable_runtime_lora_updating=True) as gateway:
            assert (await load(gateway, base_model_name="a")).status_code == 200
            for in_place in (False, True):
                answer = await load(gateway, base_model_name="b", load_inplace=in_place)
                assert failure(answer) == (400, "The lora adapter 'sql' belongs to the model 'a'.")
            assert (await ask(gateway)).status_code == 200
        assert [lora.lora_name for lora in one.requests] == ["sql"]
        assert list(other.loras) == []


async def test_an_engine_that_connects_later_loads_the_adapter_on_first_use(engines: list[FakeEngine]) -> None:
    first, later, _ = engines
    async with running_gateway(first, enable_runtime_lora_updating=True) as gateway:
        assert (await load(gateway)).status_code == 200
        pool = gateway.gateway.pool
        pool.set_engines({later.address: "later"})
        await until(lambda: [one.address for one in pool.engines if one.usable] == [later.address])
        assert (await ask(gateway)).status_code == 200
    assert [lora.lora_digest for lora in later.requests] == ["d1"]


async def test_streams_of_an_unloaded_adapter_go_on(gateway: RunningGateway, engines: list[FakeEngine]) -> None:
    for engine in engines:
        engine.step_delay, engine.script = 0.01, say("one", repeat=True)
    assert (await load(gateway)).status_code == 200
    body = {"model": "sql", "prompt": "Hi", "max_tokens": 30, "stream": True}
    async with gateway.http.stream("POST", "/v1/completions", json=body) as response:
        events = events_of(response)
        await anext(events)
        assert (await unload(gateway)).status_code == 200
        assert (await ask(gateway)).status_code == 404
        rest = [event async for event in events]
    assert rest[-2]["choices"][0]["finish_reason"] == "length"


async def test_a_request_that_meets_the_unload_is_not_found(gateway: RunningGateway, engines: list[FakeEngine]) -> None:
    assert (await load(gateway)).status_code == 200
    for engine in engines:
        engine.loras.clear()  # as if their messages were on the way
    gateway.gateway.models.loras.forget("sql")
    answer = await ask(gateway)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_without_the_flag_there_are_no_such_routes(engines: list[FakeEngine]) -> None:
    modules = (LoraModule(name="sql", path="/adapters/sql"),)
    async with running_gateway(*engines, lora_modules=modules) as gateway:
        assert (await load(gateway)).status_code == 404
        assert (await unload(gateway)).status_code == 404
        assert (await ask(gateway)).status_code == 200


async def test_adapters_are_changed_with_an_operators_key_alone() -> None:
    keys: dict[str, Any] = {"api_key": ("sk-user",), "operator_key": ("sk-operator",)}
    async with (
        FakeEngine(max_loras=2, lora_folders={"/a": "a"}) as engine,
        running_gateway(engine, enable_runtime_lora_updating=True, **keys) as gateway,
    ):
        body = {"lora_name": "a", "lora_path": "/a"}
        for key, status in (("sk-user", 403), ("sk-operator", 200)):
            headers = {"authorization": f"Bearer {key}"}
            answer = await gateway.http.post("/v1/load_lora_adapter", json=body, headers=headers)
            assert answer.status_code == status, answer.text
