"""Requests with audio over gRPC, on the fake executor: with samples, and with hashes alone, kept or not."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import grpc
import pytest

from proa.contract import Audio, AudioInput, AudioLayer, hash_audio
from proa.engine.v1 import service_pb2, service_pb2_grpc
from proa_engine.models.audio_config import AudioConfig
from proa_engine.server.request_router import MAX_INLINE_BYTES
from support.engine_client import DEADLINE, SessionClient, generate
from support.engine_server import LoadedFakeExecutor, RunningServer, running_server
from support.fake_audio import CROSS_TOKENS, cross_tokens_of, make_audio
from support.fake_executor import FakeModelConfig

Stub = service_pb2_grpc.EngineServiceStub
AUDIO, OTHER = make_audio(1), make_audio(2)
LONG = MAX_INLINE_BYTES  # samples


def executor() -> LoadedFakeExecutor:
    half = AudioLayer(kernel=1, stride=2)
    input = AudioInput(sampling_rate=16_000, hop=1, pad_to=1, layers=(half,), max_samples=LONG, cross_attention=True)
    assert input.num_tokens(AUDIO.num_samples) == cross_tokens_of(AUDIO.num_samples) == CROSS_TOKENS
    audios = AudioConfig(input=input, embedding_width=1)
    return LoadedFakeExecutor(
        model_config=FakeModelConfig(audios=audios), cross_budget=100, cross_tokens=CROSS_TOKENS, num_blocks=1024
    )


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server(executor()) as running:
        yield running


@pytest.fixture
async def stub(server: RunningServer) -> AsyncIterator[Stub]:
    async with server.channel() as channel:
        yield server.stub(channel)


async def refusal(stub: Stub, **fields: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(stub, **fields)
    return caught.value.code(), caught.value.details() or ""


async def test_model_info_says_how_audio_is_read(stub: Stub) -> None:
    info = await stub.GetModelInfo(service_pb2.GetModelInfoRequest(), timeout=DEADLINE)
    assert (info.audios.sampling_rate, info.audios.max_samples, info.audios.cross_attention) == (16_000, LONG, True)
    session = await SessionClient(stub).open()
    assert session.hello is not None
    assert session.hello.model.audios == info.audios


async def test_an_audio_changes_the_tokens_and_may_come_again_as_a_hash(stub: Stub, server: RunningServer) -> None:
    first = await generate(stub, audios=[AUDIO])
    assert await generate(stub, audios=[replace(AUDIO, samples=b"")]) == first
    assert await generate(stub, audios=[OTHER]) != first
    assert server.parts.core.counters().audios.num_encoded == 2


async def test_an_audio_that_was_not_kept_is_named(stub: Stub) -> None:
    session = await SessionClient(stub).open()
    await session.add(1, audios=[replace(AUDIO, samples=b"")])
    while not session.rejected:
        assert await session.read()
    rejected = session.rejected[1]
    assert (rejected.code, rejected.retryable) == (9, True)
    assert (rejected.missing_audios, rejected.missing_images) == (AUDIO.hash, b"")
    await session.add(2, audios=[AUDIO])
    await session.read_until_finished(2)
    assert len(session.tokens[2]) == 4


async def test_samples_with_the_hash_of_others_are_rejected_also_if_they_are_many(stub: Stub) -> None:
    long = bytes(4 * LONG)
    for audio in (AUDIO, Audio(hash=hash_audio(long), num_samples=LONG, samples=long)):
        assert await refusal(stub, audios=[replace(audio, hash=OTHER.hash)]) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "the hash of audio 0 is not that of its samples",
        )


async def test_samples_that_are_no_numbers_are_rejected(stub: Stub) -> None:
    samples = b"\0\0\xc0\x7f" + AUDIO.samples[4:]
    code, details = await refusal(stub, audios=[replace(AUDIO, samples=samples, hash=hash_audio(samples))])
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == "audio 0 has a sample that is infinite or not a number"


async def test_a_request_without_audio_is_rejected(stub: Stub) -> None:
    code, details = await refusal(stub)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == "a request to this model must have exactly one audio, got 0"
