"""EnginePool: choosing an engine, and waiting for one that is not ready yet."""

import asyncio
import math
import time
from dataclasses import replace

import pytest

from proa_gateway.engines.client import THRESHOLD, BreakerState
from proa_gateway.errors import EngineUnavailable
from proa_gateway.routing.policies import RoutingHints
from support.fake_engine import FakeEngine
from support.gateway import PATIENT, running_gateway, until
from support.processes import free_port


async def test_all_waiters_for_a_model_resume_when_its_engine_is_ready() -> None:
    port = free_port()
    async with running_gateway(ready=False) as gateway:
        pool = gateway.gateway.pool
        pool.set_engines({f"127.0.0.1:{port}": "engine"})
        waiting = [asyncio.create_task(pool.wait_for("fake", 10)) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        engine = FakeEngine()
        await engine.start(port)
        try:
            await asyncio.gather(*waiting)
            assert pool.pick("fake", RoutingHints()).engine.address == engine.address
            await pool.wait_for("fake", 0.0)
        finally:
            await engine.stop()


async def test_a_pick_has_the_attributes_of_the_route_span() -> None:
    async with FakeEngine() as one, FakeEngine() as two, running_gateway(one, two, routing="round-robin") as gateway:
        pool = gateway.gateway.pool
        picks = [pool.pick("fake", RoutingHints()) for _ in range(2)]
        assert {pick.engine.address for pick in picks} == {one.address, two.address}
        assert picks[0].span_attributes() == {
            "server.address": picks[0].engine.address,
            "proa.routing.policy": "round-robin",
            "proa.routing.num_candidates": 2,
            "proa.routing.expected_cached_tokens": 0,
        }
        last = pool.pick("fake", RoutingHints(), avoid=[picks[0].engine.address])
        assert last.engine is picks[1].engine


async def test_a_wait_for_an_engine_that_stays_unready_times_out() -> None:
    async with FakeEngine() as engine, running_gateway(ready=False) as gateway:
        engine.loading = True
        gateway.gateway.pool.set_engines({engine.address: "engine"})
        started = time.monotonic()
        with pytest.raises(EngineUnavailable, match="fake"):
            await gateway.gateway.pool.wait_for("fake", 0.2)
        assert 0.2 <= time.monotonic() - started < 5


async def test_a_wait_ends_with_the_last_grace_period() -> None:
    async with FakeEngine() as engine, running_gateway(engine, deadlines=replace(PATIENT, failover=1.0)) as gateway:
        pool = gateway.gateway.pool
        with pytest.raises(EngineUnavailable):
            await asyncio.wait_for(pool.wait_for("another model", 30), 1)
        (client,) = pool.engines
        assert client.grace_period("fake") == math.inf
        await engine.stop()
        await until(lambda: not client.usable)
        assert 0 < client.grace_period("fake") <= 1.0
        with pytest.raises(EngineUnavailable):
            await asyncio.wait_for(pool.wait_for("fake", 30), 5)
        assert not client.grace_period("fake")
        assert pool.may_serve("fake")  # after it connects again, which a stream does not wait for


async def test_a_lost_engine_is_not_waited_for_by_its_own_requests() -> None:
    async with FakeEngine() as engine, running_gateway(engine) as gateway:
        pool = gateway.gateway.pool
        await engine.stop()
        await until(lambda: not pool.ready)
        with pytest.raises(EngineUnavailable):
            await asyncio.wait_for(pool.wait_for("fake", 30, lost=[engine.address]), 1)


async def test_a_sleeping_engine_gets_no_requests_until_it_reports_that_it_is_awake() -> None:
    async with FakeEngine() as one, FakeEngine() as two, running_gateway(one, two, routing="round-robin") as gateway:
        pool = gateway.gateway.pool
        one.sleep_level = 1
        await until(lambda: sum(client.usable for client in pool.engines) == 1)
        assert {pool.pick("fake", RoutingHints()).engine.address for _ in range(4)} == {two.address}
        one.sleep_level = 0
        await until(lambda: all(client.usable for client in pool.engines))
        assert {pool.pick("fake", RoutingHints()).engine.address for _ in range(4)} == {one.address, two.address}


async def test_rejections_of_a_sleeping_engine_do_not_open_its_breaker() -> None:
    async with FakeEngine() as engine, running_gateway(engine) as gateway:
        (client,) = gateway.gateway.pool.engines
        engine.sleep_level = 1
        await until(lambda: client.is_asleep)
        for _ in range(THRESHOLD):
            client.on_failure()
        assert client.breaker_state is BreakerState.CLOSED
