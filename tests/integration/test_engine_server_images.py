"""Requests with images over gRPC, on the fake executor: with pixels, and with hashes alone, kept or not."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import grpc
import pytest

from proa.engine.v1 import service_pb2, service_pb2_grpc
from proa_engine.models.image_config import ImageConfig
from proa_engine.server.request_router import MAX_INLINE_BYTES
from support.engine_client import DEADLINE, SessionClient, generate
from support.engine_server import LoadedFakeExecutor, RunningServer, running_server
from support.fake_executor import FakeModelConfig
from support.fake_images import IMAGE_INPUT, IMAGE_TOKEN, FakeEncodings, make_image

Stub = service_pb2_grpc.EngineServiceStub
IMAGE, OTHER = make_image(1, 5, offset=2), make_image(2, 5, offset=2)
PROMPT = [1, 2, *[IMAGE_TOKEN] * 5, 3]


def executor(*, max_pixels: int = 64) -> LoadedFakeExecutor:
    images = ImageConfig(input=replace(IMAGE_INPUT, max_pixels=max_pixels), embedding_width=1)
    return LoadedFakeExecutor(
        model_config=FakeModelConfig(images=images), encodings=FakeEncodings(64, 64, attends_within=False)
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
        await generate(stub, PROMPT, **fields)
    return caught.value.code(), caught.value.details() or ""


async def test_model_info_says_how_images_are_read(stub: Stub) -> None:
    info = await stub.GetModelInfo(service_pb2.GetModelInfoRequest(), timeout=DEADLINE)
    assert (info.images.token_id, info.images.unit, info.images.max_pixels) == (IMAGE_TOKEN, 1, 64)


async def test_an_image_changes_the_tokens_and_may_come_again_as_a_hash(stub: Stub, server: RunningServer) -> None:
    first = await generate(stub, PROMPT, images=[IMAGE])
    assert await generate(stub, PROMPT, images=[replace(IMAGE, pixels=b"")]) == first
    assert await generate(stub, PROMPT, images=[OTHER]) != first
    assert server.parts.core.counters().images.num_encoded == 2


async def test_images_that_were_not_kept_are_named(stub: Stub) -> None:
    session = await SessionClient(stub).open()
    missing = [replace(image, pixels=b"") for image in (IMAGE, replace(OTHER, offset=7))]
    prompt = [*PROMPT[:7], *[IMAGE_TOKEN] * 5, 3]
    await session.add(1, prompt, images=missing)
    while not session.rejected:
        assert await session.read()
    rejected = session.rejected[1]
    assert (rejected.code, rejected.retryable) == (9, True)
    assert rejected.missing_images == IMAGE.hash + OTHER.hash
    await session.add(2, prompt, images=[IMAGE, replace(OTHER, offset=7)])
    await session.read_until_finished(2)
    assert len(session.tokens[2]) == 4


async def test_generate_without_pixels_fails_with_a_sentence(stub: Stub) -> None:
    code, details = await refusal(stub, images=[replace(IMAGE, pixels=b"")])
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert details == "the engine has not kept 1 of the request's images; send their pixels"


async def test_pixels_with_the_hash_of_others_are_rejected(stub: Stub) -> None:
    images = [replace(IMAGE, hash=OTHER.hash)]
    assert await refusal(stub, images=images) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "the hash of image 0 is not that of its pixels",
    )
    session = await SessionClient(stub).open()
    await session.add(1, PROMPT, images=images)
    while not session.rejected:
        assert await session.read()
    assert session.rejected[1].code == 3


async def test_large_images_are_checked_too() -> None:
    side = 512
    assert side * side * 3 > MAX_INLINE_BYTES
    large = make_image(1, side * side)
    with running_server(executor(max_pixels=side * side)) as server:
        async with server.channel() as channel:
            stub = server.stub(channel)
            assert await refusal(stub, images=[replace(large, hash=bytes(16))]) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "the hash of image 0 is not that of its pixels",
            )
            code, details = await refusal(stub, images=[large])
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert "must follow the image before it and be inside the prompt" in details


async def test_an_engine_that_loads_no_image_encoder_reads_none() -> None:
    with running_server(executor(), language_model_only=True) as server:
        async with server.channel() as channel:
            stub = server.stub(channel)
            info = await stub.GetModelInfo(service_pb2.GetModelInfoRequest(), timeout=DEADLINE)
            assert not info.HasField("images")
            code, details = await refusal(stub, images=[IMAGE])
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert "this engine reads no images" in details
