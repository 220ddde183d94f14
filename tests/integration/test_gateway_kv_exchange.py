"""Engines fetch blocks of prompts from each other, as the gateway tells them to."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import pytest

from proa.engine.v1 import core_pb2
from proa_gateway.engines.client import EngineClient
from support.fake_engine import FakeEngine
from support.gateway import RunningGateway, running_gateway, until
from support.routing import in_sync
from support.scrape import Scrape

PROMPT = [5 + index % 200 for index in range(1000)]
NUM_BLOCKS = 62  # before the last token


@pytest.fixture
async def engines() -> AsyncIterator[list[FakeEngine]]:
    """Two engines that exchange blocks, and compute 1,000 tokens per second."""
    movers: dict[str, FakeEngine] = {}
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(FakeEngine(movers=movers)) for _ in range(2)]
        for engine in made:
            engine.prefill_rate = 1000.0
        yield made


@pytest.fixture
async def gateway(engines: list[FakeEngine]) -> AsyncIterator[RunningGateway]:
    async with running_gateway(*engines) as gateway:
        await until(lambda: all(one.num_kv_subscriptions for one in engines))
        yield gateway


async def complete(gateway: RunningGateway, prompt: Sequence[int] = PROMPT, **fields: object) -> int:
    """Return the cached tokens of the prompt, as the client is told."""
    answer = await gateway.http.post(
        "/v1/completions", json={"prompt": prompt, "max_tokens": 2, "ignore_eos": True, **fields}
    )
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def metrics(gateway: RunningGateway) -> Scrape:
    return Scrape((await gateway.http.get("/metrics")).text)


def client_of(gateway: RunningGateway, engine: FakeEngine) -> EngineClient:
    (client,) = [one for one in gateway.gateway.pool.engines if one.address == engine.address]
    return client


async def occupy(gateway: RunningGateway, engine: FakeEngine) -> None:
    """Give the engine many requests of other gateways."""
    engine.foreign_load = 100
    await until(lambda: client_of(gateway, engine).load >= 100)


async def set_rates(gateway: RunningGateway, engines: list[FakeEngine], rate: float) -> None:
    for engine in engines:
        engine.prefill_rate = rate
    clients = gateway.gateway.pool.engines
    await until(lambda: all(one.load_stats.prefill_tokens_per_second == rate for one in clients))


async def holder_and_other(gateway: RunningGateway, engines: list[FakeEngine]) -> tuple[FakeEngine, FakeEngine]:
    """Send the prompt. Return the engine that has it, which is then busy, and the other one."""
    assert await complete(gateway) == 0
    await in_sync([gateway])
    holder, other, *_ = sorted(engines, key=lambda one: -len(one.requests))
    await occupy(gateway, holder)
    return holder, other


def source_of(request: core_pb2.EngineCoreRequest) -> tuple[list[str], int] | None:
    source = request.kv_source
    return (list(source.addresses), source.num_blocks) if request.HasField("kv_source") else None


async def test_an_engine_fetches_a_prefix_that_a_busy_engine_has(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    holder, other = await holder_and_other(gateway, engines)
    assert await complete(gateway) == 16 * NUM_BLOCKS
    assert [source_of(request) for request in other.requests] == [([holder.address], NUM_BLOCKS)]
    assert other.num_computed_tokens == len(PROMPT) - 16 * NUM_BLOCKS
    page = await metrics(gateway)
    assert page.value("proa_gateway_kv_sources_total", kind="hot_prefix") == 1
    assert page.value("proa_gateway_kv_fetched_tokens_total", kind="hot_prefix") == 16 * NUM_BLOCKS
    assert page.value("proa_gateway_kv_fetched_bytes_total", kind="hot_prefix") == 16 * 1024 * NUM_BLOCKS
    assert page.value("proa_gateway_kv_fetch_seconds_count", kind="hot_prefix") == 1
    assert source_of(holder.requests[0]) is None


async def test_nothing_is_fetched_that_is_computed_as_fast(gateway: RunningGateway, engines: list[FakeEngine]) -> None:
    await set_rates(gateway, engines, 1e6)
    _, other = await holder_and_other(gateway, engines)
    assert await complete(gateway) == 0
    assert [source_of(request) for request in other.requests] == [None]


async def test_an_engine_without_a_measured_rate_is_as_fast_as_its_peers(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    _, other = await holder_and_other(gateway, engines)
    other.prefill_rate = 0.0
    await until(lambda: not client_of(gateway, other).load_stats.prefill_tokens_per_second)
    assert await complete(gateway) == 16 * NUM_BLOCKS


async def test_nothing_is_fetched_while_no_engine_has_measured_a_rate(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    await set_rates(gateway, engines, 0.0)
    _, other = await holder_and_other(gateway, engines)
    assert await complete(gateway) == 0
    assert [source_of(request) for request in other.requests] == [None]


async def test_engines_with_other_fingerprints_exchange_nothing(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    leaving, _ = engines
    await leaving.stop()
    await until(lambda: not all(one.usable for one in gateway.gateway.pool.engines))
    port = int(leaving.address.rpartition(":")[2])
    leaving.fingerprint = b"another"
    await leaving.start(port)
    await until(lambda: all(one.usable for one in gateway.gateway.pool.engines))
    _, other = await holder_and_other(gateway, engines)
    assert await complete(gateway) == 0
    assert [source_of(request) for request in other.requests] == [None]


async def test_requests_with_the_same_prefix_wait_for_one_fetch(
    gateway: RunningGateway, engines: list[FakeEngine]
) -> None:
    holder, other = await holder_and_other(gateway, engines)
    other.step_delay = None
    tasks = [asyncio.create_task(complete(gateway, [*PROMPT[:800], number])) for number in range(3)]
    await other.until(lambda engine: len(engine.requests) == 3)
    other.step_delay = 0.0
    assert [await task for task in tasks] == [800] * 3
    assert [source_of(request) for request in other.requests] == [([holder.address], 50)] * 3
    page = await metrics(gateway)
    assert page.value("proa_gateway_kv_sources_total", kind="hot_prefix") == 3
    assert page.value("proa_gateway_kv_fetched_tokens_total", kind="hot_prefix") == 800


async def test_a_pair_whose_fetch_failed_is_avoided(gateway: RunningGateway, engines: list[FakeEngine]) -> None:
    holder, other = await holder_and_other(gateway, engines)
    movers = holder.movers
    assert movers is not None
    del movers[holder.address]  # its mover is dead
    assert await complete(gateway) == 0
    assert await complete(gateway, PROMPT[:500]) == 496  # of its own
    assert other.prefix_cache is not None
    other.prefix_cache.evict(list(other.prefix_cache.blocks))
    await in_sync([gateway])
    assert await complete(gateway) == 0
    assert [request.HasField("kv_source") for request in other.requests] == [True, False, False]


async def test_other_policies_name_no_sources(engines: list[FakeEngine]) -> None:
    async with running_gateway(*engines, routing="round-robin") as gateway:
        for _ in range(4):
            await complete(gateway)
    assert [source_of(request) for engine in engines for request in engine.requests] == [None] * 4


async def test_an_aborted_request_leaves_no_open_fetch(gateway: RunningGateway, engines: list[FakeEngine]) -> None:
    _, other = await holder_and_other(gateway, engines)
    other.step_delay = None
    task = asyncio.create_task(complete(gateway))
    await other.until(lambda engine: bool(engine.requests))
    task.cancel()
    await other.until(lambda engine: bool(engine.aborted))
    assert not gateway.gateway.pool.exchange.num_open


async def test_after_a_crash_the_next_engine_fetches_the_prompt_from_a_neighbour(engines: list[FakeEngine]) -> None:
    async with FakeEngine(movers=engines[0].movers) as third, running_gateway(*engines, third) as gateway:
        third.prefill_rate = 1000.0
        holder, _ = await holder_and_other(gateway, [*engines, third])
        others = [one for one in (*engines, third) if one is not holder]
        for engine in others:
            engine.step_delay = None
        task = asyncio.create_task(complete(gateway, max_tokens=2))
        await until(lambda: any(one.requests for one in others))
        lost, last = sorted(others, key=lambda one: -len(one.requests))
        last.step_delay = 0.0
        await lost.stop()
        assert await task == 16 * NUM_BLOCKS
        assert [source_of(request) for request in last.requests] == [([holder.address], NUM_BLOCKS)]
