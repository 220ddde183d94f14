"""The engine's gRPC server over the fake executor: both ways to generate, and how requests end."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.engine_client import DEADLINE, SessionClient, engine_request, generate, generate_request
from support.engine_server import LoadedFakeExecutor, RunningServer, running_server
from support.fake_executor import generate as expected_tokens

from proa.engine.v1 import core_pb2, service_pb2, service_pb2_grpc
from proa_engine.core.sampling_params import SamplingParams


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture
async def stub(server: RunningServer) -> AsyncIterator[service_pb2_grpc.EngineServiceStub]:
    async with server.channel() as channel:
        yield server.stub(channel)


def expected(prompt: list[int], max_tokens: int = 4) -> list[int]:
    return expected_tokens(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), frozenset(), 128)


async def test_generate_streams_the_tokens_of_one_request(stub: service_pb2_grpc.EngineServiceStub) -> None:
    responses = [response.output async for response in stub.Generate(generate_request([5, 6, 7]), timeout=DEADLINE)]

    assert [token_id for output in responses for token_id in output.new_token_ids] == expected([5, 6, 7])
    assert responses[-1].finish_reason == core_pb2.FINISH_REASON_LENGTH
    assert (responses[0].num_prompt_tokens, responses[-1].num_output_tokens) == (3, 4)
    assert [event.type for event in responses[0].events][0] == core_pb2.EVENT_TYPE_QUEUED


async def test_session_carries_many_requests(stub: service_pb2_grpc.EngineServiceStub) -> None:
    session = await SessionClient(stub).open()
    for handle in range(1, 9):
        await session.add(handle, [handle, handle + 1], max_tokens=10)
    await session.read_until_finished(*range(1, 9))

    assert session.hello.model.max_model_len == 128
    assert session.tokens == {handle: expected([handle, handle + 1], 10) for handle in range(1, 9)}
