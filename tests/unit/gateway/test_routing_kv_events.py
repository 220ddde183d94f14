"""KV events from a fake engine to the prefix index, over gRPC."""

import asyncio
from collections.abc import Sequence

import pytest

from proa.blocks import hash_blocks, root_hash
from proa.engine.v1 import service_pb2
from proa_gateway import keep_running
from proa_gateway.routing.index import PrefixIndex
from support.fake_engine import FakeEngine
from support.gateway import RunningGateway, running_gateway, until

PROMPT = list(range(1, 100))
HASHES = hash_blocks(root_hash("/models/fake", ""), PROMPT, 16)


def engine_with_events(num_host_blocks: int = 0) -> FakeEngine:
    engine = FakeEngine(num_host_blocks=num_host_blocks)
    engine.kv_events = asyncio.Queue()
    return engine


def send_event(
    engine: FakeEngine,
    sequence: int,
    *,
    stored: Sequence[bytes] = (),
    removed: Sequence[bytes] = (),
    snapshot: bool = False,
    host_stored: Sequence[bytes] = (),
    host_removed: Sequence[bytes] = (),
    host_snapshot: bool = False,
) -> None:
    message = service_pb2.SubscribeKvEventsResponse(
        sequence=sequence,
        snapshot=snapshot,
        stored=b"".join(stored),
        removed=b"".join(removed),
        host_snapshot=host_snapshot,
        host_stored=b"".join(host_stored),
        host_removed=b"".join(host_removed),
    )
    assert engine.kv_events is not None
    engine.kv_events.put_nowait(message)


def index_of(gateway: RunningGateway) -> PrefixIndex:
    return gateway.gateway.router.index.device


async def test_the_index_applies_a_snapshot_and_changes() -> None:
    async with engine_with_events() as engine, running_gateway(engine) as gateway:
        index = index_of(gateway)
        send_event(engine, 7, stored=HASHES[:2], snapshot=True)
        await until(lambda: index.count_cached(engine.address, HASHES) == 2)
        send_event(engine, 8, stored=HASHES[2:])
        await until(lambda: index.count_cached(engine.address, HASHES) == len(HASHES))
        send_event(engine, 9, removed=HASHES[1:3], stored=HASHES[2:3])
        await until(lambda: index.count_cached(engine.address, HASHES) == 1)
        send_event(engine, 10, stored=HASHES[:3], snapshot=True)
        await until(lambda: index.match(HASHES) == [(3, [engine.address])])
        index.check_integrity()
        assert engine.num_kv_subscriptions == 1


async def test_the_index_of_host_memory_applies_snapshots_and_changes_of_its_own() -> None:
    async with engine_with_events(num_host_blocks=100) as engine, running_gateway(engine) as gateway:
        index = gateway.gateway.router.index
        send_event(engine, 1, stored=HASHES[:2], snapshot=True, host_stored=HASHES[:3], host_snapshot=True)
        await until(lambda: index.host.count_cached(engine.address, HASHES) == 3)
        send_event(engine, 2, host_stored=HASHES[3:])
        await until(lambda: index.host.count_cached(engine.address, HASHES) == len(HASHES))
        send_event(engine, 3, host_removed=HASHES[4:])
        await until(lambda: index.host.count_cached(engine.address, HASHES) == 4)
        ((length, _),) = index.match(HASHES)
        assert length == pytest.approx(2 + 0.8 * 2)
        send_event(engine, 4, snapshot=True)  # the device's cache was lost
        await until(lambda: index.num_blocks == 4)
        ((length, _),) = index.match(HASHES)
        assert length == pytest.approx(0.8 * 4)


async def test_an_engine_without_host_memory_has_no_part_in_its_index() -> None:
    async with engine_with_events() as engine, running_gateway(engine) as gateway:
        index = gateway.gateway.router.index
        send_event(engine, 1, stored=HASHES[:2], snapshot=True, host_snapshot=True)
        await until(lambda: index.match(HASHES) == [(2, [engine.address])])
        assert not index.host.has_replica(engine.address)


async def test_a_gap_or_a_lost_stream_leads_to_a_new_subscription() -> None:
    async with engine_with_events() as engine, running_gateway(engine) as gateway:
        index = index_of(gateway)
        send_event(engine, 1, stored=HASHES[:5], snapshot=True)
        send_event(engine, 3, stored=HASHES[5:])
        await engine.until(lambda fake: fake.num_kv_subscriptions == 2)
        assert index.count_cached(engine.address, HASHES) == 5
        send_event(engine, 1, stored=HASHES[:4], snapshot=True)
        await until(lambda: index.count_cached(engine.address, HASHES) == 4)
        assert engine.kv_events is not None
        engine.kv_events.put_nowait(None)
        await engine.until(lambda fake: fake.num_kv_subscriptions == 3)
        send_event(engine, 1, stored=HASHES[:3], snapshot=True)
        await until(lambda: index.count_cached(engine.address, HASHES) == 3)


async def test_events_are_followed_again_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_running, "FIRST_PAUSE", 0.01)
    async with engine_with_events() as engine, running_gateway(engine) as gateway:
        index = index_of(gateway)
        with monkeypatch.context() as broken:
            broken.setattr(index, "add_confirmed", lambda address, hashes: {}[address])
            send_event(engine, 1, stored=HASHES[:5], snapshot=True)
            await engine.until(lambda fake: fake.num_kv_subscriptions >= 2)
        send_event(engine, 1, stored=HASHES[:4], snapshot=True)
        await until(lambda: index.count_cached(engine.address, HASHES) == 4)


async def test_an_engine_without_events_is_matched_by_the_requests_sent_to_it() -> None:
    async with FakeEngine() as one, FakeEngine() as two, running_gateway(one, two) as gateway:
        for _ in range(4):
            response = await gateway.complete(PROMPT, max_tokens=1)
            assert response.status_code == 200
        assert sorted([len(one.requests), len(two.requests)]) == [0, 4]
        index = index_of(gateway)
        assert [length for length, _ in index.match(HASHES)] == [len(HASHES)]


async def test_a_lost_engine_is_removed_from_the_index() -> None:
    async with running_gateway("127.0.0.1:1", ready=False) as gateway:
        index = index_of(gateway)
        engine = engine_with_events()
        gateway.gateway.pool.set_engines({await engine.start(): "engine"})
        send_event(engine, 1, stored=HASHES, snapshot=True)
        await until(lambda: index.match(HASHES))
        await engine.stop()
        await until(lambda: not index.num_blocks)
        assert not index.match(HASHES)
