"""SubscribeKvEvents over gRPC: a subscriber's blocks are those that a prompt hits in the cache."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from proa.blocks import hash_blocks, root_hash
from proa.engine.v1 import service_pb2, service_pb2_grpc
from support.engine_client import DEADLINE, engine_request, generate
from support.engine_server import LoadedFakeExecutor, RunningServer, running_server

BLOCK_SIZE = 4
ROOT = root_hash("fake", "")
PROMPT = list(range(1, 14))  # three full blocks and a token


class Subscriber:
    """Reads one message at a time."""

    def __init__(self, stub: service_pb2_grpc.EngineServiceStub) -> None:
        self.call = stub.SubscribeKvEvents(service_pb2.SubscribeKvEventsRequest(), timeout=DEADLINE)
        self.held: list[bytes] = []

    async def read(self) -> Any:
        message = await self.call.read()
        assert message is not grpc.aio.EOF
        if message.snapshot:
            self.held.clear()
        for block_hash in split(message.removed):
            self.held.remove(block_hash)
        self.held += split(message.stored)
        return message

    async def read_until(self, *hashes: bytes) -> None:
        while not set(hashes) <= set(self.held):
            await self.read()


def split(column: bytes) -> list[bytes]:
    return [column[start : start + 16] for start in range(0, len(column), 16)]


@pytest.fixture
async def stub() -> AsyncIterator[service_pb2_grpc.EngineServiceStub]:
    with running_server(LoadedFakeExecutor(num_blocks=16)) as server:
        async with server.channel() as channel:
            yield server.stub(channel)


async def test_subscriber_gets_the_hashes_of_a_prompts_blocks(
    stub: service_pb2_grpc.EngineServiceStub,
) -> None:
    subscriber = Subscriber(stub)
    first = await subscriber.read()
    assert (first.snapshot, first.stored) == (True, b"")
    await generate(stub, PROMPT, max_tokens=1)
    await subscriber.read_until(*hash_blocks(ROOT, PROMPT, BLOCK_SIZE))
    assert subscriber.held == hash_blocks(ROOT, PROMPT, BLOCK_SIZE)
    late = Subscriber(stub)
    snapshot = await late.read()
    assert snapshot.snapshot
    assert late.held == subscriber.held


async def test_cache_salt_changes_the_hashes(stub: service_pb2_grpc.EngineServiceStub) -> None:
    subscriber = Subscriber(stub)
    await subscriber.read()
    request = engine_request(PROMPT, max_tokens=1)
    request.cache_salt = "salt"
    async for _ in stub.Generate(service_pb2.GenerateRequest(request=request), timeout=DEADLINE):
        pass
    await subscriber.read_until(*hash_blocks(ROOT, PROMPT, BLOCK_SIZE, ["salt"]))


async def test_reported_blocks_are_hit_while_others_are_evicted() -> None:
    rng = random.Random(0)
    prompts = [list(range(start, start + 30)) for start in (0, 15, 30)]  # seven full blocks each, more than there are
    with running_server(LoadedFakeExecutor(num_blocks=16)) as server:
        async with server.channel() as channel:
            stub = server.stub(channel)
            subscriber, num_found = Subscriber(stub), 0
            await subscriber.read()
            for _ in range(30):
                prompt = rng.choice(prompts)
                hashes = hash_blocks(ROOT, prompt, BLOCK_SIZE)
                known = next((i for i, block_hash in enumerate(hashes) if block_hash not in subscriber.held), 7)
                call = stub.Generate(service_pb2.GenerateRequest(request=engine_request(prompt, max_tokens=1)))
                (output,) = [response.output async for response in call]
                assert output.num_cached_tokens == known * BLOCK_SIZE
                num_found += known
                while set(subscriber.held) != server.parts.core._scheduler._manager._cache.cached_blocks.keys():
                    await subscriber.read()
            assert 0 < num_found < 30 * 7


async def test_subscription_without_prefix_caching_fails() -> None:
    with running_server(enable_prefix_caching=False) as server:
        async with server.channel() as channel:
            assert await code_of(server, channel) is grpc.StatusCode.FAILED_PRECONDITION


async def code_of(server: RunningServer, channel: grpc.aio.Channel) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await Subscriber(server.stub(channel)).read()
    return caught.value.code()


async def test_shutdown_ends_the_stream_and_does_not_wait_for_it() -> None:
    with running_server() as server:
        async with server.channel() as channel:
            subscriber = Subscriber(server.stub(channel))
            await subscriber.read()
            server.server.request_stop()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await subscriber.read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await asyncio.to_thread(server.thread.join, DEADLINE)
    assert server.result == [0]


async def test_cancelled_subscription_is_removed() -> None:
    with running_server() as server:
        async with server.channel() as channel:
            unfollowed = threading.Event()
            server.parts.core.unfollow_kv_events = unfollowed.set  # type: ignore[method-assign]
            subscriber = Subscriber(server.stub(channel))
            await subscriber.read()
            subscriber.call.cancel()
            assert await asyncio.to_thread(unfollowed.wait, DEADLINE)
