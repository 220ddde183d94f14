"""Adapters over gRPC, in an engine with a tiny model: loading, unloading, what sessions and metrics show of them."""

import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from proa.engine.v1 import service_pb2, service_pb2_grpc
from support.adapters import ADAPTERS, lora_modules, write_adapter
from support.engine_client import DEADLINE, SessionClient, generate
from support.engine_server import serving_model
from support.tiny_models import make_tiny_model

Stub = service_pb2_grpc.EngineServiceStub
ALL, SOME, OTHERS = ADAPTERS
PROMPT = range(1, 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `model`, and one for each adapter."""
    folder = tmp_path_factory.mktemp("lora")
    make_tiny_model(folder / "model", "qwen3", seed=3)
    for seed, adapter in enumerate(ADAPTERS):
        write_adapter(folder / "model", folder / adapter.name, adapter, seed=seed)
    return folder


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    modules = lora_modules(folder, ALL)
    with serving_model(folder / "model", "tiny", enable_lora=True, max_loras=2, lora_modules=modules) as port:
        yield port


@pytest.fixture
async def stub(port: int) -> AsyncIterator[Stub]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Stub(channel)


async def load(stub: Stub, name: str, path: Path | str, *, replace: bool = False) -> service_pb2.Lora:
    request = service_pb2.LoadLoraRequest(name=name, path=str(path), replace=replace)
    answer: service_pb2.LoadLoraResponse = await stub.LoadLora(request, timeout=DEADLINE)
    return answer.lora


async def unload(stub: Stub, name: str) -> None:
    await stub.UnloadLora(service_pb2.UnloadLoraRequest(name=name), timeout=DEADLINE)


def names(session: SessionClient) -> list[str]:
    return [lora.name for lora in session.loras]


async def test_a_session_has_the_loaded_adapters_from_the_start_and_after_each_change(stub: Stub, folder: Path) -> None:
    assert (await stub.GetModelInfo(service_pb2.GetModelInfoRequest())).max_loras == 2
    session = await SessionClient(stub).open()
    assert names(session) == ["all"]
    assert session.loras[0].path == str(folder / "all")
    assert len(session.loras[0].digest) == 64
    lora = await load(stub, "some", folder / "some")
    while names(session) != ["all", "some"]:
        assert await session.read()
    assert session.loras[1] == lora
    await unload(stub, "some")
    while names(session) != ["all"]:
        assert await session.read()


async def test_an_adapter_changes_the_tokens_and_an_unknown_one_is_rejected(stub: Stub) -> None:
    session = await SessionClient(stub).open()
    await session.add(1, PROMPT, max_tokens=4, temperature=0)
    await session.add(2, PROMPT, max_tokens=4, temperature=0, lora_name="all")
    await session.add(3, PROMPT, max_tokens=4, temperature=0, lora_name="all", lora_digest=session.loras[0].digest)
    await session.add(4, PROMPT, max_tokens=4, temperature=0, lora_name="some")
    await session.add(5, PROMPT, max_tokens=4, temperature=0, lora_name="all", lora_digest="other")
    await session.read_until_finished(1, 2, 3)
    while len(session.rejected) < 2:
        assert await session.read()
    assert session.tokens[1] != session.tokens[2] == session.tokens[3]
    for handle in (4, 5):
        rejected = session.rejected[handle]
        assert (rejected.code, rejected.retryable) == (grpc.StatusCode.NOT_FOUND.value[0], True)


async def test_faults_of_loads_and_unloads_have_their_status(stub: Stub, folder: Path) -> None:
    other = write_adapter(folder / "model", folder / "other", ALL, seed=9)
    wide = write_adapter(folder / "model", folder / "wide", type(ALL)("wide", rank=32))
    cases = [
        (load(stub, "no", "/no/adapter"), grpc.StatusCode.NOT_FOUND),
        (load(stub, "", folder / "some"), grpc.StatusCode.INVALID_ARGUMENT),
        (load(stub, "some", ""), grpc.StatusCode.INVALID_ARGUMENT),
        (load(stub, "tiny", folder / "some"), grpc.StatusCode.INVALID_ARGUMENT),
        (load(stub, "wide", wide), grpc.StatusCode.INVALID_ARGUMENT),
        (load(stub, "all", other), grpc.StatusCode.ALREADY_EXISTS),
        (unload(stub, "no"), grpc.StatusCode.NOT_FOUND),
        (unload(stub, ""), grpc.StatusCode.INVALID_ARGUMENT),
    ]
    for call, code in cases:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert error.value.code() is code, error.value.details()
        assert error.value.details()


async def test_an_adapter_is_replaced_on_demand(stub: Stub, folder: Path) -> None:
    first = await load(stub, "new", folder / "some")
    assert (await load(stub, "new", folder / "some")) == first
    second = await load(stub, "new", folder / "others", replace=True)
    assert second.digest != first.digest
    tokens = await generate(stub, PROMPT, max_tokens=4, temperature=0, lora_name="new")
    await unload(stub, "new")
    await load(stub, "others", folder / "others")
    assert await generate(stub, PROMPT, max_tokens=4, temperature=0, lora_name="others") == tokens
    await unload(stub, "others")


async def test_a_stream_of_an_unloaded_adapter_goes_on(stub: Stub, folder: Path) -> None:
    await load(stub, "some", folder / "some")
    expected = await generate(stub, PROMPT, max_tokens=60, temperature=0, lora_name="some")
    session = await SessionClient(stub).open()
    await session.add(1, PROMPT, max_tokens=60, temperature=0, lora_name="some")
    while not session.tokens:
        assert await session.read()
    await unload(stub, "some")
    await session.read_until_finished(1)
    assert session.tokens[1] == expected


async def test_a_folder_that_would_block_or_confuse_the_reader_stops_no_other_load(stub: Stub, folder: Path) -> None:
    bad = folder / "bad"
    shutil.copytree(folder / "some", bad)
    config = bad / "adapter_config.json"
    good = json.loads(config.read_text())
    for content in (json.dumps(good | {"lora_alpha": 10**400}), "[" * 100_000):
        config.write_text(content)
        assert await refusal(stub, bad) is grpc.StatusCode.INVALID_ARGUMENT
    config.unlink()
    os.mkfifo(config)
    assert await refusal(stub, bad) is grpc.StatusCode.INVALID_ARGUMENT
    assert (await load(stub, "some", folder / "some")).name == "some"
    await unload(stub, "some")


async def refusal(stub: Stub, path: Path) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await load(stub, "bad", path)
    return error.value.code()
