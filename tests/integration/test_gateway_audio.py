"""Transcriptions and translations over HTTP, from the client's file to what an engine gets and back."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from proa.engine.v1 import core_pb2
from proa_cli.main import main
from proa_gateway.apis.audio import transcription
from proa_gateway.audio.config import DECODING_BYTES, AudioOptions
from support.audio_files import encode
from support.fake_engine import EOS, FakeEngine, Reply, prompt_ids
from support.gateway import RunningGateway, events_of, running_gateway, until
from support.speech import RATE, ids, levels, whisper_engine
from support.tokenizers import byte_level_tokenizer

FILE = encode(levels(3), RATE)
LONG = encode(levels(1, 2, 3, 4, 5), RATE)
WHOLE = "Window 1. Window 2. Window 3. Window 4. Window 5."


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with whisper_engine() as engine:
        yield engine


@pytest.fixture
async def gateway(engine: FakeEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine) as gateway:
        yield gateway


async def post(
    gateway: RunningGateway, file: bytes | None = FILE, path: str = "transcriptions", **fields: Any
) -> httpx.Response:
    files = {} if file is None else {"file": ("a.wav", file)}
    data = {"model": "fake"} | fields
    return await gateway.http.post(f"/v1/audio/{path}", data=data, files=files or {"x": b""})


def sent(engine: FakeEngine) -> list[core_pb2.EngineCoreRequest]:
    """The requests for text, without those that ask for the language and whether there is speech."""
    return [each for each in engine.requests if names(prompt_ids(each)) != ["<|startoftranscript|>"]]


def names(token_ids: list[int]) -> list[str | int]:
    by_id = {token_id: name for name, token_id in ids().items()}
    return [by_id.get(token_id, token_id) for token_id in token_ids]


async def test_the_official_client_gets_the_text_and_its_duration(gateway: RunningGateway) -> None:
    response = await gateway.openai.audio.transcriptions.create(model="fake", file=FILE)
    assert response.text == "Window 3."
    assert response.usage is not None
    assert response.usage.model_dump() == {"type": "duration", "seconds": 2}


async def test_the_language_is_found_once_and_stands_in_the_prompts(
    engine: FakeEngine, gateway: RunningGateway
) -> None:
    assert (await post(gateway, LONG)).json()["text"] == WHOLE
    first, others = engine.requests[0], sent(engine)
    assert names(prompt_ids(first)) == ["<|startoftranscript|>"]
    assert first.sampling_params.max_tokens == 1
    assert len(others) == 5
    start = ["<|startoftranscript|>", "<|de|>", "<|transcribe|>", "<|notimestamps|>"]
    assert all(names(prompt_ids(each)) == start for each in others)
    assert len({each.audios[0].hash for each in others}) == 5
    assert all(each.sampling_params.temperature == 0 for each in others)


async def test_a_given_language_is_not_looked_for_and_translations_are_another_task(
    engine: FakeEngine, gateway: RunningGateway
) -> None:
    client = gateway.openai.audio
    await client.transcriptions.create(model="fake", file=FILE, language="ja")
    with pytest.deprecated_call():  # by OpenAI
        await client.translations.create(model="fake", file=FILE)
    found = [names(prompt_ids(each))[1:3] for each in sent(engine)]
    assert found == [["<|ja|>", "<|transcribe|>"], ["<|de|>", "<|translate|>"]]


async def test_a_model_that_knows_english_only_has_no_language_in_its_prompt() -> None:
    async with whisper_engine(multilingual=False) as engine, running_gateway(engine) as gateway:
        assert (await post(gateway, language="en")).json()["text"] == "Window 3."
        assert names(prompt_ids(sent(engine)[0])) == ["<|startoftranscript|>", "<|notimestamps|>"]
        translated = await post(gateway, path="translations")
        german = await post(gateway, language="de")
    assert translated.json()["error"]["code"] == "unsupported_task"
    assert german.json()["error"]["message"].endswith("does not know the language 'de', only en.")


async def test_the_text_before_stands_before_each_window_cut_to_what_fits(
    engine: FakeEngine, gateway: RunningGateway
) -> None:
    await post(gateway, language="de", prompt=" Hello ")
    await post(gateway, language="de", prompt="x" * 100)
    await post(gateway, language="de", prompt="a <|de|>")
    short, long, special = (names(prompt_ids(each)) for each in sent(engine))
    assert short[0] == long[0] == "<|startofprev|>"
    assert long.index("<|startoftranscript|>") == 1 + 31
    assert special.count("<|de|>") == 1
    assert len(special) > len(short)


async def test_windows_run_side_by_side_and_their_texts_are_in_order(engine: FakeEngine) -> None:
    engine.step_delay = None
    async with running_gateway(engine) as gateway:
        waiting = asyncio.create_task(post(gateway, encode(levels(*range(1, 10), 1, 2), RATE), language="de"))
        await engine.until(lambda each: len(each.requests) == 8)
        engine.step_delay = 0
        text = (await waiting).json()["text"]
    assert text == " ".join(f"Window {number}." for number in (*range(1, 10), 1, 2))
    assert len(sent(engine)) == 11


async def test_windows_in_languages_without_spaces_are_joined_without_them(gateway: RunningGateway) -> None:
    assert (await post(gateway, LONG, language="ja")).json()["text"] == WHOLE.replace(". ", ".")


async def test_silence_is_not_sent_to_an_engine(engine: FakeEngine, gateway: RunningGateway) -> None:
    response = await post(gateway, encode(levels(0, 0), RATE))
    assert response.json()["text"] == ""
    assert await (await post(gateway, encode(levels(0, 2, 0), RATE))).aread()
    assert len(sent(engine)) == 1
    metrics = (await gateway.http.get("/metrics")).text
    assert 'proa_gateway_transcription_windows_total{outcome="silent"} 4.0' in metrics
    assert 'proa_gateway_transcription_windows_total{outcome="accepted"} 1.0' in metrics
    assert 'proa_gateway_audios_total{outcome="prepared"} 2.0' in metrics


async def test_a_stream_has_openais_events(gateway: RunningGateway) -> None:
    stream = await gateway.openai.audio.transcriptions.create(model="fake", file=LONG, stream=True, language="de")
    *deltas, done = [event async for event in stream]
    assert {event.type for event in deltas} == {"transcript.text.delta"}
    assert len(deltas) > 5
    assert done.type == "transcript.text.done"
    assert "".join(event.delta for event in deltas if event.type == "transcript.text.delta") == done.text == WHOLE
    assert done.usage is not None
    details = done.usage.input_token_details
    assert details is not None
    assert (details.audio_tokens, details.text_tokens) == (500, 20)
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_those_of_the_texts_tokens(gateway: RunningGateway, stream: bool) -> None:
    created: Any = await gateway.openai.audio.transcriptions.create(
        model="fake", file=FILE, include=["logprobs"], stream=stream
    )
    if stream:
        *deltas, created = [event async for event in created]
        listed = [each.model_dump() for event in deltas for each in event.logprobs or ()]
        assert listed == [each.model_dump() for each in created.logprobs]
    assert created.logprobs is not None
    assert b"".join(bytes(map(int, each.bytes)) for each in created.logprobs) == b" Window 3."
    assert {each.logprob for each in created.logprobs} == {-0.25}


async def test_text_is_plain_text(gateway: RunningGateway) -> None:
    response = await post(gateway, response_format="text")
    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    assert response.text == "Window 3.\n"
    text: Any = await gateway.openai.audio.transcriptions.create(model="fake", file=FILE, response_format="text")
    assert text == "Window 3.\n"


async def test_timestamps_that_a_model_writes_unasked_are_no_text(engine: FakeEngine, gateway: RunningGateway) -> None:
    engine.script = lambda request: Reply([ids()["<|0.00|>"], 70, 71, ids()["<|1.00|>"], ids()["<|1.00|>"], 0])
    text = (await post(gateway, language="de")).json()["text"]
    assert len(text) == 2


async def test_tokens_that_the_model_suppresses_are_never_sampled(engine: FakeEngine, gateway: RunningGateway) -> None:
    await post(gateway, language="de")
    params = sent(engine)[0].sampling_params
    assert [list(word.token_ids) for word in params.bad_words_token_ids] == [[5], [6]]
    assert list(params.begin_suppress_token_ids) == [7, EOS]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"language": "xx"}, "language"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"temperature": 3}, "temperature"),
        ({"stream": "maybe"}, "stream"),
        ({"stream": "true", "response_format": "text"}, "response_format"),
        ({"chunking_strategy[type]": "server_vad"}, "chunking_strategy[type]"),
        ({"known_speaker_names[]": "Ann"}, "known_speaker_names"),
        ({"hotwords": "Ann"}, "hotwords"),
        ({"n": "2"}, "n"),
    ],
)
async def test_fields_that_cannot_be_honoured_are_refused_by_name(
    gateway: RunningGateway, fields: dict[str, Any], param: str
) -> None:
    response = await post(gateway, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_a_form_without_a_file_and_a_json_body_are_refused(gateway: RunningGateway) -> None:
    for response in (await post(gateway, None), await post(gateway, b"")):
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "missing_required_parameter"
    response = await gateway.http.post("/v1/audio/transcriptions", json={"model": "fake"})
    assert response.status_code == 415
    assert "multipart/form-data" in response.json()["error"]["message"]


async def test_a_file_that_is_no_audio_is_refused_also_in_a_stream(gateway: RunningGateway) -> None:
    for fields in ({}, {"stream": "true"}):
        response = await post(gateway, b"hello", **fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "file"
        assert "Invalid or unsupported audio file" in response.json()["error"]["message"]
    with pytest.raises(openai.BadRequestError, match="Invalid or unsupported audio file"):
        await gateway.openai.audio.transcriptions.create(model="fake", file=b"hello")


async def test_models_are_known_by_their_task(engine: FakeEngine, gateway: RunningGateway) -> None:
    (card,) = (await gateway.http.get("/v1/models")).json()["data"]
    assert card["task"] == "transcribe"
    assert card["input_modalities"] == ["text", "audio"]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
        "/v1/completions": {"prompt": "Hi"},
        "/v1/embeddings": {"input": "Hi"},
        "/v1/responses": {"input": "Hi"},
        "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    }
    for path, body in bodies.items():
        assert (await gateway.http.post(path, json={"model": "fake", **body})).status_code == 404, path
    async with FakeEngine() as chat, running_gateway(chat) as other:
        response = await post(other)
    assert response.status_code == 404
    assert "reads no audio" in response.json()["error"]["message"]


async def test_an_error_in_a_stream_is_its_last_event(engine: FakeEngine) -> None:
    engine.step_delay = None
    async with (
        running_gateway(engine, sse_keep_alive_interval=0.05) as gateway,
        gateway.http.stream(
            "POST", "/v1/audio/transcriptions", data={"stream": "true", "language": "de"}, files={"file": FILE}
        ) as response,
    ):
        assert response.status_code == 200
        await engine.until(lambda each: len(each.requests) == 1)
        for _ in range(4):  # attempts
            await engine.stop()
        *_, error, done = [event async for event in events_of(response)]
    assert done == "[DONE]"
    assert json.dumps(error).startswith('{"error"')


async def command(
    gateway: RunningGateway, capsys: pytest.CaptureFixture[str], *words: str | Path
) -> tuple[int, str, str]:
    """The status, output and errors of `proa transcribe`."""
    url = f"--url=http://127.0.0.1:{gateway.port}/v1"
    status = await asyncio.to_thread(main, ["transcribe", url, *map(str, words)])
    return (status, *capsys.readouterr())


async def test_the_command_transcribe_prints_the_text_of_files(
    gateway: RunningGateway, engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = (tmp_path / name for name in ("a.wav", "b.flac", "c.txt"))
    for path, file in ((first, FILE), (second, encode(levels(1, 2), RATE, "flac")), (third, b"hello")):
        path.write_bytes(file)
    assert await command(gateway, capsys, first, second) == (0, "Window 3.\nWindow 1. Window 2.\n", "")
    found = await command(gateway, capsys, first, "--translate", "--language=ja", "--prompt=Ann")
    assert found == (0, "Window 3.\n", "")
    assert names(prompt_ids(sent(engine)[-1]))[-3:-1] == ["<|ja|>", "<|translate|>"]
    status, out, _ = await command(gateway, capsys, first, "--format=json")
    assert (status, json.loads(out)["text"]) == (0, "Window 3.")
    status, out, error = await command(gateway, capsys, third)
    assert (status, out) == (1, "")
    assert error.startswith("proa: error: Invalid or unsupported audio file: the formats are")
    async with FakeEngine() as chat, running_gateway(chat) as other:
        assert "has no speech model" in (await command(other, capsys, first))[2]


async def test_the_command_transcribe_prints_times_of_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.wav").write_bytes(FILE)
    granularity = "--timestamp-granularities"
    words = [str(tmp_path / "a.wav"), granularity, "word"]
    async with aligner() as engine, running_gateway(engine) as gateway:
        status, out, error = await command(gateway, capsys, *words, "--format=verbose_json")
        assert (status, error) == (0, "")
        assert "segments" not in json.loads(out)
        assert json.loads(out)["words"][0] == {"word": "One", "start": 0.0, "end": 0.04}
        _, out, _ = await command(gateway, capsys, *words, granularity, "segment", "--format=verbose_json")
        assert [len(json.loads(out)[name]) for name in ("segments", "words")] == [3, 7]
        with pytest.raises(SystemExit):
            await command(gateway, capsys, *words, "--format=srt")
        assert "--timestamp-granularities needs --format verbose_json" in capsys.readouterr().err


async def test_another_engine_continues_the_windows_of_a_lost_one(engine: FakeEngine) -> None:
    engine.step_delay = None
    data, path = {"stream": "true", "language": "de"}, "/v1/audio/transcriptions"
    async with whisper_engine() as other, running_gateway(engine) as gateway:
        sending = gateway.http.stream("POST", path, data=data, files={"file": LONG})
        waiting = asyncio.create_task(sending.__aenter__())
        await engine.until(lambda each: len(each.requests) == 5)
        for _ in range(3):
            await engine.step()
        events = events_of(await waiting)
        text = (await anext(events))["delta"]
        gateway.gateway.pool.set_engines({engine.address: "", other.address: ""})
        await engine.stop()
        text += "".join([event.get("delta", "") async for event in events if event != "[DONE]"])
        await sending.__aexit__(None, None, None)
    assert text == WHOLE
    assert all(each.resumed_token_ids for each in other.requests)
    assert all(each.audios[0].samples for each in other.requests)


async def test_a_client_that_leaves_ends_its_requests_and_frees_their_memory(engine: FakeEngine) -> None:
    engine.step_delay = None
    async with running_gateway(engine) as gateway:
        waiting = asyncio.create_task(post(gateway, LONG, language="de"))
        await engine.until(lambda each: len(each.requests) == 5)
        memory = gateway.gateway.audios.memory
        assert memory.num_bytes > len(LONG)
        waiting.cancel()
        await engine.until(lambda each: len(each.aborted) == 5)
        await until(lambda: memory.num_bytes == 0)


async def test_the_memory_of_files_is_bounded_and_freed(engine: FakeEngine) -> None:
    engine.step_delay = None
    options = AudioOptions(max_audio_bytes=len(LONG), max_audio_memory=DECODING_BYTES + 2 * len(LONG))
    async with running_gateway(engine, audio=options) as gateway:
        first = asyncio.create_task(post(gateway, LONG, language="de"))
        await engine.until(lambda each: len(each.requests) >= 1)
        too_many = await post(gateway, LONG)
        engine.step_delay = 0
        assert (await first).json()["text"] == WHOLE
        assert (await post(gateway, FILE)).json()["text"] == "Window 3."
        too_large = await post(gateway, LONG + b"x")
    assert too_many.status_code == 429
    assert too_many.json()["error"]["code"] == "overloaded"
    assert too_large.status_code == 413


async def test_many_clients_at_once_get_their_texts(gateway: RunningGateway) -> None:
    files = {number: encode(levels(number), RATE, name) for number, name in enumerate(("wav", "flac", "mp3"), start=1)}
    numbers = [1 + index % 3 for index in range(24)]
    texts = await asyncio.gather(*(post(gateway, files[number], stream="false") for number in numbers))
    assert [each.json()["text"] for each in texts] == [f"Window {number}." for number in numbers]


def timed(*parts: str) -> list[int]:
    """Tokens of texts and timestamps, with the end token."""
    tokenizer = byte_level_tokenizer()
    return [each for part in parts for each in ([ids()[part]] if part in ids() else tokenizer.encode(part).ids)] + [EOS]


SAID = timed("<|0.00|>", " One", "<|0.50|>", "<|0.80|>", " two --> 2.", "<|1.20|>", "<|1.20|>", " three")


async def test_verbose_json_has_segments_with_times_of_the_whole_audio(
    engine: FakeEngine, gateway: RunningGateway
) -> None:
    engine.script = lambda request: Reply([ids()["<|de|>"]] if request.sampling_params.max_tokens == 1 else SAID)
    response = await gateway.openai.audio.transcriptions.create(
        model="fake", file=encode(levels(1, 2), RATE), response_format="verbose_json"
    )
    assert response.language == "german"
    assert response.duration == pytest.approx(3.3)
    assert response.text == "One two --> 2. three One two --> 2. three"
    segments = response.segments
    assert segments is not None
    assert [each.text for each in segments] == [" One", " two --> 2.", " three"] * 2
    second = 1.75
    assert [(each.start, each.end) for each in segments] == [
        *((0.0, 0.5), (0.8, 1.2), (1.2, second)),
        *((second, second + 0.5), (second + 0.8, second + 1.2), (second + 1.2, 3.3)),
    ]
    assert [each.id for each in segments] == list(range(6))
    assert [each.seek for each in segments] == [0] * 3 + [175] * 3
    assert segments[0].tokens == SAID[: segments[0].tokens.index(ids()["<|0.50|>"]) + 1]
    assert {each.avg_logprob for each in segments} == {-0.25}
    assert [each.no_speech_prob for each in segments] == pytest.approx([math.exp(-0.25)] * 6)
    assert {each.temperature for each in segments} == {0.0}
    assert all(each.compression_ratio > 0 for each in segments)
    request = sent(engine)[0]
    assert "<|notimestamps|>" not in names(prompt_ids(request))
    rules = request.sampling_params.timestamps
    assert rules.begin_id == ids()["<|0.00|>"]
    assert (rules.no_timestamps_id, rules.end_id, rules.max_initial_index) == (ids()["<|notimestamps|>"], EOS, 50)


async def test_what_a_model_has_not_written_of_a_window_is_read_again(
    engine: FakeEngine, gateway: RunningGateway
) -> None:
    """It ends with the start of a segment: OpenAI's Whisper goes on from there."""

    def reply(request: core_pb2.EngineCoreRequest) -> Reply:
        is_whole = request.audios[0].num_samples > RATE
        return Reply(timed("<|0.00|>", " One", "<|1.00|>", "<|1.00|>") if is_whole else timed("<|0.20|>", " more"))

    engine.script = reply
    body = (await post(gateway, LONG, response_format="verbose_json", language="de")).json()
    assert body["text"] == " ".join(["One more"] * 5)
    starts = [0.0, 1.75, 3.55, 5.35, 7.15]
    times = [(each["seek"], each["start"]) for each in body["segments"]]
    assert times == [time for start in starts for time in ((100 * start, start), (100 * start + 100, start + 1.2))]
    assert len(sent(engine)) == 10


async def test_subtitles_are_plain_text_in_their_formats(engine: FakeEngine, gateway: RunningGateway) -> None:
    engine.script = lambda request: Reply(SAID)
    srt = await post(gateway, response_format="srt", language="de")
    vtt = await post(gateway, response_format="vtt", language="de")
    assert srt.headers["content-type"] == vtt.headers["content-type"] == "text/plain; charset=utf-8"
    assert srt.text == (
        "1\n00:00:00,000 --> 00:00:00,500\nOne\n\n2\n00:00:00,800 --> 00:00:01,200\ntwo -> 2.\n\n"
        "3\n00:00:01,200 --> 00:00:01,500\nthree\n"
    )
    assert vtt.text.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:00.500\nOne\n\n00:00:00.800 --> 00:00:01.200\n")
    streamed = await post(gateway, response_format="srt", stream="true")
    assert streamed.status_code == 400


async def test_granularities_of_timestamps_are_for_verbose_json(engine: FakeEngine, gateway: RunningGateway) -> None:
    """Words only of a model that has what their times need."""
    segments: dict[str, Any] = {"timestamp_granularities[]": "segment"}
    for name in ("json", "text", "srt"):
        refused = await post(gateway, response_format=name, **segments)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "timestamp_granularities"
    assert (await post(gateway, **segments)).status_code == 400
    words = await post(gateway, response_format="verbose_json", timestamp_granularities="word")
    assert words.status_code == 400
    assert words.json()["error"]["message"] == "The model 'fake' names no alignment heads, which times of words need."
    assert not engine.requests
    accepted = await post(gateway, response_format="verbose_json", timestamp_granularities="segment")
    assert accepted.status_code == 200


def aligner() -> FakeEngine:
    """An engine whose model writes `SAID`."""

    def read(request: core_pb2.EngineCoreRequest) -> list[list[float]]:
        """The second token of the text is said 0.8 s after the first one, the others each 0.02 s after the last."""
        places = [max(0, row - 4) for row in range(len(prompt_ids(request)))]  # the prompt has 4 tokens before the text
        columns = [place + 40 if place > 1 else place for place in places]
        num_columns = request.pooling_params.dimensions
        return [[1.0 if each == column else -1.0 for each in range(num_columns)] for column in columns]

    engine = whisper_engine(pooling_tasks=[core_pb2.POOLING_TASK_ALIGN], pool=read)
    engine.script = lambda request: Reply([ids()["<|de|>"]] if request.sampling_params.max_tokens == 1 else SAID)
    return engine


async def test_words_have_times_of_the_whole_audio() -> None:
    async with aligner() as engine, running_gateway(engine) as gateway:
        response = await gateway.openai.audio.transcriptions.create(
            model="fake",
            file=encode(levels(1, 2), RATE),
            response_format="verbose_json",
            timestamp_granularities=["word", "segment"],
        )
        only = await post(gateway, response_format="verbose_json", timestamp_granularities="word")
    assert response.words is not None
    assert response.segments is not None
    assert [each.word for each in response.words] == ["One", "two", "-", "-", ">", "2.", "three"] * 2
    times = [0.0, 0.04, 0.86, 0.9, 0.92, 0.94, 1.0, 1.02]
    expected = [pair for start in (0, 1.75) for pair in pairwise(start + each for each in times)]
    assert [(each.start, each.end) for each in response.words] == [pytest.approx(pair) for pair in expected]
    assert len(response.segments) == 6
    aligned = [each for each in engine.requests if each.HasField("pooling_params")]
    prompt = ["<|startoftranscript|>", "<|de|>", "<|transcribe|>", "<|notimestamps|>"]
    assert all(names(prompt_ids(each))[:4] == prompt for each in aligned)
    assert len({each.audios[0].hash for each in aligned}) == 3
    body = only.json()
    assert "segments" not in body
    assert [each["word"] for each in body["words"]] == ["One", "two", "-", "-", ">", "2.", "three"]
    assert body["words"][0] == {"word": "One", "start": 0.0, "end": 0.04}


@pytest.mark.parametrize(
    ("text", "reason", "attempts"),
    [
        (" Fine.", core_pb2.FINISH_REASON_STOP, 1),
        (" Ha" * 20, core_pb2.FINISH_REASON_STOP, 6),  # compresses well
        (" Fine.", core_pb2.FINISH_REASON_REPETITION, 6),
    ],
)
async def test_unlikely_text_is_sampled_again_at_higher_temperatures(
    engine: FakeEngine, gateway: RunningGateway, text: str, reason: core_pb2.FinishReason, attempts: int
) -> None:
    engine.script = lambda request: Reply(timed(text), reason)
    response = await post(gateway, language="de", seed="7")
    assert response.json()["text"] == text.strip()
    params = [each.sampling_params for each in sent(engine)]
    assert [round(each.temperature, 1) for each in params] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0][:attempts]
    assert len({each.key for each in params}) == attempts
    assert len({each.audios[0].hash for each in sent(engine)}) == 1
    assert sum(bool(each.audios[0].samples) for each in engine.requests) == 1
    metrics = (await gateway.http.get("/metrics")).text
    assert (f'windows_total{{outcome="retried"}} {attempts - 1}.0' in metrics) == (attempts > 1)


async def test_of_texts_that_are_all_unlikely_one_that_does_not_repeat_itself_is_kept(
    engine: FakeEngine, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcription, "MIN_LOGPROB", 0.0)
    monkeypatch.setattr(transcription, "MAX_NO_SPEECH", 1.0)

    def reply(request: core_pb2.EngineCoreRequest) -> Reply:
        temperature = round(request.sampling_params.temperature, 1)
        repeats = temperature != 0.4
        return Reply(
            timed(f" At {temperature}."),
            core_pb2.FINISH_REASON_REPETITION if repeats else core_pb2.FINISH_REASON_STOP,
        )

    engine.script = reply
    assert (await post(gateway, language="de")).json()["text"] == "At 0.4."
    assert len(sent(engine)) == 6


async def test_streams_and_given_temperatures_have_one_attempt(engine: FakeEngine, gateway: RunningGateway) -> None:
    engine.script = lambda request: Reply(timed(" Ha" * 20))
    await post(gateway, language="de", temperature=0.5)
    await post(gateway, language="de", stream="true")
    assert [round(each.sampling_params.temperature, 1) for each in engine.requests] == [0.5, 0.0]


async def test_a_window_without_speech_has_no_text(
    engine: FakeEngine, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcription, "MIN_LOGPROB", 0.0)  # as if the text were unlikely
    assert (await post(gateway, language="de")).json()["text"] == ""
    assert len(sent(engine)) == 1
