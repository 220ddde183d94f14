"""Operators' calls over gRPC: configuration, prefix cache, sleep and wake up."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from proa.engine.v1 import core_pb2, service_pb2, service_pb2_grpc
from support.engine_client import DEADLINE, SessionClient, generate
from support.engine_server import RunningServer, running_server, wait_for_health

Stub = service_pb2_grpc.EngineServiceStub


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture
async def stub(server: RunningServer) -> AsyncIterator[Stub]:
    async with server.channel() as channel:
        yield server.stub(channel)


async def sleep(stub: Stub, level: int = 1, *, wait: bool = False) -> None:
    await stub.Sleep(service_pb2.SleepRequest(level=level, wait=wait), timeout=DEADLINE)


async def wake_up(stub: Stub) -> None:
    await stub.WakeUp(service_pb2.WakeUpRequest(), timeout=DEADLINE)


async def sleep_level(stub: Stub) -> int:
    load: service_pb2.GetLoadResponse = await stub.GetLoad(service_pb2.GetLoadRequest())
    return load.stats.sleep_level


async def test_server_info_has_the_options_of_the_engine(stub: Stub) -> None:
    info = await stub.GetServerInfo(service_pb2.GetServerInfoRequest())
    assert json.loads(info.config)["max_num_batched_tokens"] == 64


async def test_a_reset_empties_the_prefix_cache(stub: Stub, server: RunningServer) -> None:
    tokens = await generate(stub, range(40))
    await stub.ResetPrefixCache(service_pb2.ResetPrefixCacheRequest(), timeout=DEADLINE)
    assert await generate(stub, range(40)) == tokens
    assert server.parts.core.stats().prefix_cache_hits == 0


async def test_a_sleeping_engine_is_not_ready_and_rejects_requests_until_it_wakes_up(
    stub: Stub, server: RunningServer
) -> None:
    session = await SessionClient(stub).open()
    tokens = await generate(stub, [5, 6])
    await sleep(stub, 2)
    assert await sleep_level(stub) == 2
    await asyncio.to_thread(wait_for_health, server.port, "", serving=False)
    with pytest.raises(grpc.aio.AioRpcError, match="the engine sleeps") as caught:
        await generate(stub, [5, 6])
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await session.add(1)
    while 1 not in session.rejected:
        await session.read()
    assert session.rejected[1].retryable
    assert session.stats is not None
    assert session.stats.sleep_level == 2
    await wake_up(stub)
    await asyncio.to_thread(wait_for_health, server.port, "")
    assert await sleep_level(stub) == 0
    assert await generate(stub, [5, 6]) == tokens


async def test_running_requests_end_with_abort_when_the_engine_sleeps() -> None:
    with running_server(step_timeout=30) as server:
        async with server.channel() as channel:
            stub = server.stub(channel)
            session = await SessionClient(stub).open()
            await session.add(1, max_tokens=100)
            await asyncio.gather(sleep(stub), session.read_until_finished(1))
    assert session.finished[1].finish_reason in (core_pb2.FINISH_REASON_ABORT, core_pb2.FINISH_REASON_LENGTH)


async def test_sleep_can_wait_for_running_requests(stub: Stub) -> None:
    session = await SessionClient(stub).open()
    await session.add(1, max_tokens=100)
    await asyncio.gather(sleep(stub, wait=True), session.read_until_finished(1))
    assert session.finished[1].finish_reason == core_pb2.FINISH_REASON_LENGTH


async def test_a_level_that_does_not_exist_is_refused(stub: Stub) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="level must be 1 or 2, got 3"):
        await sleep(stub, 3)
    assert await sleep_level(stub) == 0
