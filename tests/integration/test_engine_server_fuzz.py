"""Odd and broken messages are rejected with the field's name, and harm neither the process nor other requests."""

import math
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from proa.contract import SamplingParams
from proa.engine.v1 import core_pb2, service_pb2
from support.engine_client import DEADLINE, SessionClient, engine_request, generate
from support.engine_server import RunningServer, running_server
from support.fake_executor import generate as expected_tokens
from support.sampling_params import FLOATS

SERVICE = "/proa.engine.v1.EngineService/"
METHODS = ("Generate", "Session", "Abort", "GetModelInfo", "GetTokenizer", "GetLoad")
# What a caller's own mistake may be told. UNKNOWN and INTERNAL would be the engine's.
ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


@pytest.fixture
async def world() -> AsyncIterator[tuple[RunningServer, grpc.aio.Channel]]:
    with running_server() as server:
        async with server.channel() as channel:
            yield server, channel


async def code_of(channel: grpc.aio.Channel, method: str, messages: list[bytes]) -> grpc.StatusCode:
    """Send raw bytes; return the status of the call."""
    send: Any = channel.stream_stream(SERVICE + method)
    call = send(iter(messages), timeout=DEADLINE)
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError:
        pass
    code: grpc.StatusCode = await call.code()
    return code


async def assert_unharmed(world: tuple[RunningServer, grpc.aio.Channel]) -> None:
    server, channel = world
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    tokens = await generate(server.stub(channel), [4, 2], max_tokens=6)
    assert tokens == expected_tokens([4, 2], params, frozenset(), 128)
    assert server.parts.core.stats().kv_cache_usage == 0
    assert server.exits == []
    server.parts.core.check_integrity()


@pytest.mark.parametrize("method", METHODS)
async def test_random_bytes_are_rejected(world: tuple[RunningServer, grpc.aio.Channel], method: str) -> None:
    rng = random.Random(method)
    codes = {await code_of(world[1], method, [rng.randbytes(rng.randrange(1, 60))]) for _ in range(40)}

    assert codes <= ALLOWED
    assert grpc.StatusCode.INVALID_ARGUMENT in codes
    await assert_unharmed(world)


async def test_flipped_bits_are_rejected_or_harmless(world: tuple[RunningServer, grpc.aio.Channel]) -> None:
    rng = random.Random(1)
    codes = set()
    for _ in range(150):
        message = service_pb2.GenerateRequest(request=engine_request([1, 2, 3], temperature=0.5, stop_token_ids=[3]))
        data = bytearray(message.SerializeToString())
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        codes.add(await code_of(world[1], "Generate", [bytes(data)]))

    assert codes <= ALLOWED
    await assert_unharmed(world)


NUMBERS: tuple[float, ...] = (0, 1, -1, 2, 1e9, -1e9, 0.5, math.nan, math.inf, -math.inf)
COUNTS = (0, 1, 2, 5, 60, 61, 127, 128, 2**31, 2**32 - 1)


def odd_request(rng: random.Random) -> core_pb2.EngineCoreRequest:
    """A request whose fields are each valid, unset or odd."""

    def some(make: Any, most: int = 3) -> list[Any]:
        return [make() for _ in range(rng.randrange(most))]

    def count() -> int:
        return rng.choice(COUNTS)

    params: dict[str, Any] = {"max_tokens": rng.randrange(1, 9)}
    for name in rng.sample(FLOATS, rng.randrange(2)):
        params[name] = rng.choice(NUMBERS)
    for name in rng.sample(("top_k", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"), rng.randrange(2)):
        params[name] = count()
    for name in rng.sample(("allowed_token_ids", "stop_token_ids"), rng.randrange(2)):
        params[name] = some(count)
    if rng.random() < 0.2:
        params["bad_words_token_ids"] = [core_pb2.TokenSequence(token_ids=some(count)) for _ in range(2)]
    if rng.random() < 0.2:
        params["logit_bias"] = {count(): rng.choice(NUMBERS)}
    prompt = some(lambda: rng.randrange(61), 30) + (some(count, 2) if rng.random() < 0.3 else [])
    request = engine_request(prompt, request_id=rng.choice(("", "", "", "same", "x" * 300)), **params)
    if rng.random() < 0.2:
        request.prompt_token_ids += b"\x01"
    if rng.random() < 0.2:
        request.resumed_token_ids = rng.choice((b"\x01\0\0\0", b"\xff\xff\xff\xff", b"1"))
    if rng.random() < 0.2:
        request.arrival_time = rng.choice(NUMBERS)
    if rng.random() < 0.2:
        request.priority = rng.choice((-(2**31), 2**31 - 1))
        request.cache_salt = "ß" * rng.randrange(1000)
        request.trace_headers["traceparent"] = rng.choice(("", "00-zz-1", "ß"))
    return request


async def test_odd_fields_are_rejected_or_served(world: tuple[RunningServer, grpc.aio.Channel]) -> None:
    rng = random.Random(2)
    codes = []
    for _ in range(200):
        message = service_pb2.GenerateRequest(request=odd_request(rng))
        codes.append(await code_of(world[1], "Generate", [message.SerializeToString()]))

    assert set(codes) <= ALLOWED
    assert codes.count(grpc.StatusCode.OK) > 20
    assert codes.count(grpc.StatusCode.INVALID_ARGUMENT) > 20
    await assert_unharmed(world)


async def test_session_answers_every_odd_request(world: tuple[RunningServer, grpc.aio.Channel]) -> None:
    rng = random.Random(3)
    session = await SessionClient(world[0].stub(world[1])).open()
    for handle in range(1, 201):
        request = odd_request(rng)
        await session.call.write(service_pb2.SessionRequest(add=service_pb2.AddRequest(handle=handle, request=request)))
        if rng.random() < 0.2:
            await session.abort(rng.choice(COUNTS))
    await session.add(201)
    while len(session.finished) + len(session.rejected) < 150 or 201 not in session.finished:
        assert await session.read()

    await assert_unharmed(world)
