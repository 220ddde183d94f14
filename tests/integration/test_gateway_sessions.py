"""With `--session-admission retain` a gateway tells engines which blocks conversations keep, and which they give up."""

import asyncio
import re
from collections.abc import Sequence

import pytest

from proa.blocks import hash_blocks, root_hash
from proa.engine.v1 import core_pb2, service_pb2
from support.fake_engine import FakeEngine
from support.gateway import RunningGateway, running_gateway, until

BLOCK = 16
OUTPUT = 20  # tokens: with the block that a prompt leaves open, at least one block


def prompt(name: int, num_blocks: int) -> list[int]:
    """Of this many full blocks and half a block."""
    return [name] * (BLOCK * num_blocks + BLOCK // 2)


async def turn(gateway: RunningGateway, engine: FakeEngine, tokens: list[int]) -> core_pb2.EngineCoreRequest:
    """Send a prompt. Return what the only engine got."""
    return (await turn_of_several(gateway, [engine], tokens))[1]


async def turn_of_several(
    gateway: RunningGateway, engines: Sequence[FakeEngine], tokens: list[int]
) -> tuple[FakeEngine, core_pb2.EngineCoreRequest]:
    """Send a prompt. Return the engine that got it, and what it got."""
    before = [len(engine.requests) for engine in engines]
    body = {"prompt": tokens, "max_tokens": OUTPUT, "ignore_eos": True}
    answer = await gateway.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    engine = next(one for one, count in zip(engines, before, strict=True) if len(one.requests) > count)
    return engine, engine.requests[-1]


async def test_later_turns_of_a_conversation_retain_their_blocks() -> None:
    async with FakeEngine() as engine, running_gateway(engine, session_admission="retain") as gateway:
        assert not (await turn(gateway, engine, prompt(7, 3))).retain
        assert (await turn(gateway, engine, prompt(7, 6))).retain
        assert (await turn(gateway, engine, prompt(7, 9))).retain
        assert not (await turn(gateway, engine, prompt(8, 9))).retain


async def test_without_the_flag_nothing_is_retained() -> None:
    async with FakeEngine() as engine, running_gateway(engine) as gateway:
        await turn(gateway, engine, prompt(7, 3))
        assert not (await turn(gateway, engine, prompt(7, 6))).retain


async def test_blocks_of_a_conversation_that_loses_its_place_are_released_with_those_of_its_output() -> None:
    async with (
        FakeEngine(num_gpu_blocks=40) as engine,
        running_gateway(engine, session_admission="retain") as gateway,
    ):
        for name in (7, 8):
            await turn(gateway, engine, prompt(name, 3))
            await turn(gateway, engine, prompt(name, 6))
        outgrown = await turn(gateway, engine, prompt(7, 36))
        info = engine.info
        tokens = [*prompt(8, 6), *engine.script(engine.requests[3]).token_ids[: OUTPUT - 1]]
        hashes = hash_blocks(root_hash(info.model, info.revision), tokens, BLOCK)
        assert len(hashes) > 6
        assert outgrown.released == b"".join(hashes)


async def test_conversations_are_known_after_their_engine_has_connected_again_but_have_no_place() -> None:
    async with (
        FakeEngine(num_gpu_blocks=20) as engine,
        running_gateway(engine, session_admission="retain") as gateway,
    ):
        for name in (7, 8):
            await turn(gateway, engine, prompt(name, 3))
        assert (await turn(gateway, engine, prompt(7, 12))).retain
        assert not (await turn(gateway, engine, prompt(8, 12))).retain
        port = int(engine.address.rpartition(":")[2])
        await engine.stop()
        await until(lambda: not gateway.gateway.pool.ready)
        await engine.start(port)
        await until(lambda: gateway.gateway.pool.ready)
        assert (await turn(gateway, engine, prompt(8, 14))).retain
        assert not (await turn(gateway, engine, prompt(7, 14))).retain


@pytest.mark.parametrize("how", ["drains", "is lost"])
async def test_conversations_get_places_on_another_engine_if_theirs(how: str) -> None:
    async with (
        FakeEngine() as one,
        FakeEngine() as two,
        running_gateway(one, two, session_admission="wait") as gateway,
    ):
        engines = (one, two)
        await turn_of_several(gateway, engines, prompt(7, 3))
        home, request = await turn_of_several(gateway, engines, prompt(7, 6))
        assert request.retain
        assert (await turn_of_several(gateway, engines, prompt(7, 9)))[0] is home
        await (home.drain() if how == "drains" else home.stop())
        await until(lambda: sum(each.usable for each in gateway.gateway.pool.engines) == 1)
        other, request = await turn_of_several(gateway, engines, prompt(7, 12))
        assert other is not home
        assert request.retain


async def test_engines_are_told_what_conversations_claim_if_they_read_it() -> None:
    async with FakeEngine() as old, FakeEngine() as engine:
        engine.info.session_claims = True
        async with running_gateway(engine, session_admission="retain") as gateway:
            for blocks in (3, 6):
                await turn(gateway, engine, prompt(7, blocks))
            await engine.until(lambda engine: engine.claim.num_blocks >= 6)
        async with running_gateway(old, session_admission="retain") as gateway:
            for blocks in (3, 6):
                await turn(gateway, old, prompt(7, blocks))
            assert not old.claim.num_blocks


def completion(name: int, num_blocks: int, **fields: object) -> dict[str, object]:
    return {"prompt": prompt(name, num_blocks), "max_tokens": OUTPUT, "ignore_eos": True, **fields}


async def fill(gateway: RunningGateway, engine: FakeEngine) -> None:
    """A conversation has a place, and one more does not fit into a cache of 20 blocks."""
    for name in (7, 8):
        await turn(gateway, engine, prompt(name, 3))
    await turn(gateway, engine, prompt(7, 12))


async def test_the_response_says_how_a_turn_came_to_its_place() -> None:
    async with (
        FakeEngine(num_gpu_blocks=20) as engine,
        running_gateway(engine, session_admission="wait", session_max_wait=0.05) as gateway,
    ):
        await fill(gateway, engine)
        found = [
            (await gateway.http.post("/v1/completions", json=completion(name, blocks))).headers["x-proa-session"]
            for name, blocks in ((9, 3), (7, 13), (8, 12))
        ]
    assert found[:2] == ["new", "resident"]
    assert re.fullmatch(r"visitor;ms=\d+", found[2])


async def test_prompts_with_another_cache_salt_are_another_conversation() -> None:
    async with FakeEngine() as engine, running_gateway(engine, session_admission="wait") as gateway:
        found = [
            (await gateway.http.post("/v1/completions", json=completion(7, blocks, cache_salt=salt))).headers[
                "x-proa-session"
            ]
            for salt, blocks in (("one", 3), ("one", 6), ("two", 9), ("one", 9), ("two", 12))
        ]
    assert found == ["new", "resident", "new", "resident", "resident"]


async def test_prompts_for_another_adapter_are_another_conversation() -> None:
    folders = {"/adapters/sql": "d1", "/adapters/law": "d2"}
    loras = {"sql": "/adapters/sql", "law": "/adapters/law"}
    async with (
        FakeEngine(max_loras=2, lora_folders=folders, loras=loras) as engine,
        running_gateway(engine, session_admission="wait") as gateway,
    ):
        found = [
            (await gateway.http.post("/v1/completions", json=completion(7, blocks, model=model))).headers[
                "x-proa-session"
            ]
            for model, blocks in (("sql", 3), ("sql", 6), ("law", 9), ("fake", 9), ("sql", 9), ("law", 12))
        ]
    assert found == ["new", "resident", "new", "new", "resident", "resident"]


async def test_places_stay_when_kv_events_are_lost() -> None:
    """Only a turn whose blocks another gateway has brought depends on them: it waits until they are known again."""
    async with FakeEngine(num_gpu_blocks=20) as engine:
        events = asyncio.Queue[service_pb2.SubscribeKvEventsResponse | None]()
        engine.kv_events = events
        info = engine.info
        hashes = hash_blocks(root_hash(info.model, info.revision), prompt(8, 12), BLOCK)

        async def know(gateway: RunningGateway, stored: Sequence[bytes]) -> None:
            snapshot = service_pb2.SubscribeKvEventsResponse(sequence=1, snapshot=True, stored=b"".join(stored))
            events.put_nowait(snapshot)
            index = gateway.gateway.router.index.device
            await until(lambda: index.count_confirmed(engine.address, hashes) == len(stored))

        async with running_gateway(engine, session_admission="wait", session_max_wait=0.05) as gateway:
            await fill(gateway, engine)
            await know(gateway, hashes)
            events.put_nowait(service_pb2.SubscribeKvEventsResponse(sequence=3))  # 2 is lost
            await engine.until(lambda fake: fake.num_kv_subscriptions == 2)
            await know(gateway, [])
            found = []
            for name, blocks, stored in ((7, 13, ()), (8, 9, ()), (8, 12, hashes)):
                await know(gateway, stored)
                answer = await gateway.http.post("/v1/completions", json=completion(name, blocks))
                found.append(answer.headers["x-proa-session"].partition(";")[0])
        assert found == ["resident", "visitor", "resident"]


async def test_a_stream_whose_conversation_waits_for_a_place_has_a_status_and_comments() -> None:
    async with (
        FakeEngine(num_gpu_blocks=20) as engine,
        running_gateway(
            engine, session_admission="wait", session_max_wait=1.0, sse_keep_alive_interval=0.05
        ) as gateway,
    ):
        await fill(gateway, engine)
        num_before = len(engine.requests)
        async with gateway.http.stream("POST", "/v1/completions", json=completion(8, 12, stream=True)) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            assert await anext(lines) == ": keep-alive"
            assert len(engine.requests) == num_before
            assert [line async for line in lines][-2:] == ["data: [DONE]", ""]
