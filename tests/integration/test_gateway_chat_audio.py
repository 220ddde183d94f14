"""Audio in chats: from the body of a request to what an engine gets."""

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openai
import pytest

from proa.contract import AudioInput, AudioLayer, hash_audio
from proa.contract.pb import to_pb
from proa.engine.v1 import service_pb2
from proa_gateway.audio.memory import HeldSamples
from proa_gateway.images.config import ImageOptions, PromptLimit
from support.audio_files import Samples, encode, tone
from support.chat_images import (
    END,
    PAD,
    START,
    TEMPLATE,
    TEXT_TEMPLATE,
    image_engine,
    image_input,
    image_part,
    prompt_of,
    user,
)
from support.fake_engine import FakeEngine, prompt_ids, say
from support.gateway import RunningGateway, running_gateway
from support.speech import RATE

AUDIO_TEMPLATE = TEMPLATE.replace("'image'", "'audio'")
HOP = RATE // 10


def audio_engine(template: str = AUDIO_TEMPLATE) -> FakeEngine:
    """Its model makes a token of each 0.1 s, and reads 2 s."""
    engine, images = image_engine(template=template, script=say("A tone.")), image_input()
    audio = AudioInput(
        sampling_rate=RATE,
        hop=HOP,
        pad_to=HOP,
        layers=(AudioLayer(kernel=1, stride=1),),
        max_samples=2 * RATE,
        token_id=images.token_id,
        token=PAD,
        placeholder=images.placeholder,
        prefix=START,
        suffix=END,
    )
    engine.info.ClearField("images")
    engine.info.audios.CopyFrom(to_pb(service_pb2.AudioInput, audio))
    return engine


def samples_of(seconds: float) -> Samples:
    return tone(seconds, RATE, level=0.5)


def base64_of(seconds: float) -> str:
    return b64encode(encode(samples_of(seconds), RATE, "wav of floats")).decode()


def audio_part(seconds: float) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64_of(seconds), "format": "mp3"}}


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with audio_engine() as engine:
        yield engine


@pytest.fixture
async def gateway(engine: FakeEngine) -> AsyncIterator[RunningGateway]:
    options = ImageOptions(limit_mm_per_prompt=PromptLimit(audio=2))
    async with running_gateway(engine, routing="prefix", images=options) as gateway:
        yield gateway


async def create(gateway: RunningGateway, *parts: Any) -> Any:
    return await gateway.openai.chat.completions.create(model="fake", messages=[user(*parts)])  # type: ignore[list-item]


async def test_audios_stand_in_the_prompt_where_the_template_shows_them(
    engine: FakeEngine, gateway: RunningGateway
) -> None:
    url = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{base64_of(0.5)}"}}
    response = await create(gateway, "One: ", audio_part(0.3), " two: ", url)
    first, second = engine.requests[0].audios
    assert prompt_of(engine) == f"user: One: {START}{PAD * 3}{END} two: {START}{PAD * 5}{END}\nassistant: "
    assert (first.num_tokens, second.num_tokens) == (3, 5)
    assert first.hash == hash_audio(samples_of(0.3).astype("<f4").tobytes())
    ids = prompt_ids(engine.requests[0])
    assert len(set(ids[second.offset : second.offset + 5])) == 1
    usage = response.usage
    assert usage.prompt_tokens == len(prompt_ids(engine.requests[0]))
    assert usage.prompt_tokens_details.audio_tokens == 8
    assert usage.prompt_tokens_details.multimodal_tokens == {"audio": 8}


async def test_decoding_does_not_outlast_the_time_of_its_request(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(HeldSamples, "take", wait)
    body = {"model": "fake", "messages": [user(audio_part(0.3))]}
    headers = {"x-request-timeout": "0.05"}
    response = await gateway.http.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 504
    assert response.json()["error"]["message"] == "The prompt was not ready within the request's time."


async def test_a_file_that_was_decoded_before_is_not_decoded_again(engine: FakeEngine, gateway: RunningGateway) -> None:
    for seconds in (0.3, 0.5, 0.3):
        await create(gateway, audio_part(seconds))
    assert engine.requests[0].audios[0].hash == engine.requests[2].audios[0].hash
    metrics = await gateway.http.get("/metrics")
    assert gateway_sample(metrics, 'proa_gateway_audios_total{outcome="prepared"}') == 2
    assert gateway_sample(metrics, 'proa_gateway_audios_total{outcome="cached"}') == 1


def gateway_sample(response: Any, name: str) -> float:
    return float(next(line for line in response.text.splitlines() if line.startswith(name)).split()[-1])


async def test_a_silent_audio_is_read_as_zeros(engine: FakeEngine, gateway: RunningGateway) -> None:
    data = b64encode(encode(np.full(RATE, 1e-4, np.float32), RATE, "wav of floats")).decode()
    await create(gateway, {"type": "audio_url", "audio_url": f"data:;base64,{data}"})
    assert engine.requests[0].audios[0].hash == hash_audio(bytes(4 * RATE))


async def test_a_template_of_texts_gets_the_placeholder_before_the_text() -> None:
    async with audio_engine(TEXT_TEMPLATE) as engine, running_gateway(engine) as gateway:
        await create(gateway, "What?", audio_part(0.2))
        assert prompt_of(engine) == f"user: {START}{PAD * 2}{END}\nWhat?\n"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([audio_part(0.1)] * 3, "At most 2 audios may be in one prompt"),
        ([audio_part(2.5)], "it is longer than 2 seconds, the limit"),
        ([{"type": "input_audio", "input_audio": {"data": "AAAA"}}], "Invalid or unsupported audio file"),
        ([{"type": "input_audio", "input_audio": {"data": "*"}}], "The data URL's base64 is damaged"),
        ([{"type": "audio_url", "audio_url": "http://a.example/b"}], "Audio files are not fetched from the URL's host"),
        ([image_part()], "the model 'fake' does not read images"),
        ([f"What is {PAD}?", audio_part(0.1)], "outside of its audios|stands for an audio"),
    ],
)
async def test_audios_that_cannot_be_used_are_refused(
    gateway: RunningGateway, engine: FakeEngine, parts: Any, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as error:
        await create(gateway, *parts)
    assert str(error.value.param).startswith("messages")
    assert not engine.requests


async def test_a_model_that_reads_no_audio_refuses_it() -> None:
    async with image_engine() as engine, running_gateway(engine) as gateway:
        with pytest.raises(openai.BadRequestError, match="the model 'fake' does not read audio"):
            await create(gateway, audio_part(0.1))
