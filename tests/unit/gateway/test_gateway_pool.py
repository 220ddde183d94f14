"""EnginePool: waiting for an engine that is not there yet."""

import asyncio
import time

import pytest

from proa_gateway.errors import EngineUnavailable
from proa_gateway.types import RouteWish
from support.fake_engine import FakeEngine
from support.gateway import running_gateway
from support.processes import free_port


async def test_whoever_waits_for_a_model_goes_on_when_its_engine_is_ready() -> None:
    port = free_port()
    async with running_gateway(f"127.0.0.1:{port}", ready=False) as gateway:
        pool = gateway.gateway.pool
        waiting = [asyncio.create_task(pool.wait_for("fake", 10)) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        engine = FakeEngine()
        await engine.start(port)
        try:
            await asyncio.gather(*waiting)
            assert pool.pick("fake", RouteWish()).engine.address == engine.address
            await pool.wait_for("fake", 0.0)
        finally:
            await engine.stop()


async def test_a_pick_says_what_a_trace_wants_to_know() -> None:
    async with FakeEngine() as one, FakeEngine() as two, running_gateway(one, two, routing="round-robin") as gateway:
        pool = gateway.gateway.pool
        picks = [pool.pick("fake", RouteWish()) for _ in range(2)]
        assert {pick.engine.address for pick in picks} == {one.address, two.address}
        assert picks[0].to_attributes() == {
            "server.address": picks[0].engine.address,
            "proa.routing.policy": "round-robin",
            "proa.routing.num_candidates": 2,
            "proa.routing.expected_cached_tokens": 0,
        }
        last = pool.pick("fake", RouteWish(), avoid=[picks[0].engine.address])
        assert last.engine is picks[1].engine


async def test_a_wait_for_a_model_that_does_not_come_ends_in_time() -> None:
    async with FakeEngine(model_name="other") as engine, running_gateway(engine) as gateway:
        started = time.monotonic()
        with pytest.raises(EngineUnavailable, match="fake"):
            await gateway.gateway.pool.wait_for("fake", 0.2)
        assert 0.2 <= time.monotonic() - started < 5
