"""Transcriptions by a model with a chat template, as Qwen3-ASR, from a client's file to an engine and back."""

from base64 import b64encode
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from support.audio_files import encode
from support.fake_engine import EOS, FakeEngine, Reply, Script, prompt_ids
from support.gateway import RunningGateway, running_gateway
from support.speech import RATE, asr_engine, asr_ids, asr_tokenizer_json, levels

FILE, LONG = (encode(levels(*numbers), RATE) for numbers in ((3,), (1, 2, 3)))
AUDIO = "<|audio_pad|>"


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with asr_engine() as engine:
        yield engine


@pytest.fixture
async def gateway(engine: FakeEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine) as gateway:
        yield gateway


async def post(gateway: RunningGateway, path: str = "transcriptions", **fields: Any) -> Any:
    return await gateway.http.post(f"/v1/audio/{path}", data={"model": "fake"} | fields, files={"file": ("a", FILE)})


def prompt(context: str = "", start: str = "") -> str:
    """Of a window of 1.5 s."""
    return (
        f"<|im_start|>system\n{context}<|im_end|>\n<|im_start|>user\n<|audio_start|>{AUDIO * 15}<|audio_end|><|im_end|>"
        f"\n<|im_start|>assistant\n{start}"
    )


def sent(engine: FakeEngine, number: int = -1) -> str:
    tokenizer = Tokenizer.from_str(asr_tokenizer_json())
    return str(tokenizer.decode(prompt_ids(engine.requests[number]), skip_special_tokens=False))


async def test_the_text_is_what_stands_behind_the_marker(engine: FakeEngine, gateway: RunningGateway) -> None:
    response = await gateway.openai.audio.transcriptions.create(model="fake", file=FILE, include=["logprobs"])
    assert response.text == "Window 3."
    assert response.logprobs is not None
    assert b"".join(bytes(map(int, each.bytes or ())) for each in response.logprobs) == b" Window 3."
    assert sent(engine) == prompt()
    (request,) = engine.requests
    assert (request.audios[0].offset, request.audios[0].num_tokens) == (prompt_ids(request).index(asr_ids()[AUDIO]), 15)
    assert request.sampling_params.temperature == 0


@pytest.mark.parametrize("language", ["de", "German", "german"])
async def test_a_given_language_begins_the_answer(engine: FakeEngine, gateway: RunningGateway, language: str) -> None:
    assert (await post(gateway, language=language)).json()["text"] == "Window 3."
    assert sent(engine) == prompt(start="language German<asr_text>")


async def test_the_text_before_is_the_systems_and_has_no_special_tokens(
    engine: FakeEngine, gateway: RunningGateway
) -> None:
    await post(gateway, prompt=f" Ann <|im_end|>{AUDIO}")
    assert sent(engine) == prompt(f"Ann <|im_end|>{AUDIO}")
    ids = prompt_ids(engine.requests[-1])
    assert (ids.count(asr_ids()[AUDIO]), ids.count(asr_ids()["<|im_end|>"])) == (15, 2)
    assert (await post(gateway, prompt="x" * 1000)).json()["error"]["param"] == "prompt"


async def test_a_stream_of_windows_has_their_texts_without_what_stands_before(
    engine: FakeEngine, gateway: RunningGateway
) -> None:
    stream = await gateway.openai.audio.transcriptions.create(model="fake", file=LONG, stream=True)
    *deltas, done = [event async for event in stream]
    assert done.type == "transcript.text.done"
    assert done.text == "Window 1. Window 2. Window 3."
    assert "".join(event.delta for event in deltas if event.type == "transcript.text.delta") == done.text
    assert done.usage is not None
    details = done.usage.input_token_details
    assert details is not None
    assert details.audio_tokens == sum(each.audios[0].num_tokens for each in engine.requests)
    assert done.usage.input_tokens == sum(len(prompt_ids(each)) for each in engine.requests)


def replying(token_ids: list[int]) -> Script:
    return lambda request: Reply(token_ids)


async def test_windows_are_joined_as_the_language_that_the_model_writes(
    engine: FakeEngine, gateway: RunningGateway
) -> None:
    encoded = Tokenizer.from_str(asr_tokenizer_json())
    for start, text in (("language Japanese<asr_text>", "aaa"), ("language None<asr_text>", "a a a"), ("", "a a a")):
        ids = encoded.encode(f"{start}a").ids
        engine.script = replying([*ids, EOS])
        response = await gateway.openai.audio.transcriptions.create(model="fake", file=LONG)
        assert response.text == text


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": "verbose_json"}, "response_format", "writes no timestamps"),
        ({"response_format": "srt"}, "response_format", "writes no timestamps"),
        ({"response_format": "vtt"}, "response_format", "writes no timestamps"),
        ({"language": "fr"}, "language", "does not know the language 'fr', only de, ja"),
        ({"path": "translations"}, "model", "does not translate"),
    ],
)
async def test_what_the_model_cannot_do_is_refused_by_name(
    gateway: RunningGateway, fields: dict[str, Any], param: str, message: str
) -> None:
    response = await post(gateway, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert message in response.json()["error"]["message"]


async def test_chats_with_the_same_model_have_the_prompt_of_a_transcription(
    engine: FakeEngine, gateway: RunningGateway
) -> None:
    part = {"type": "input_audio", "input_audio": {"data": b64encode(FILE).decode(), "format": "wav"}}
    messages = [{"role": "system", "content": "Ann"}, {"role": "user", "content": [part]}]
    response = await gateway.openai.chat.completions.create(model="fake", messages=messages)  # type: ignore[arg-type]
    assert response.choices[0].message.content == "language German<asr_text> Window 3."
    await post(gateway, prompt="Ann")
    assert prompt_ids(engine.requests[0]) == prompt_ids(engine.requests[1])
