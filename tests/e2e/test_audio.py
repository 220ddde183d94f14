"""A tiny Whisper model in two pods, whose files the gateway's pod decodes in processes of their own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from support.audio_files import encode
from support.kube import Release, eventually
from support.model_folders import config_map, pool
from support.span_receiver import Span, span_receiver
from support.whisper_models import RATE, file_of, greedy_text, make_whisper, tone

NUM_TOKENS = 24
SMALL = {"requests": {"cpu": "250m", "memory": "256Mi"}, "limits": {"memory": "768Mi"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module", autouse=True)
def spans(release: Release, folder: Path) -> Iterator[Callable[[], list[Span]]]:
    release.apply(config_map("whisper", folder))
    with span_receiver(release) as (endpoint, received):
        release.install(
            engines={"whisper": {**pool("whisper", folder), "replicas": 2}},
            gateway__resources=SMALL,
            otel__OTEL_EXPORTER_OTLP_ENDPOINT=endpoint,
        )
        yield received


def transcribe(client: OpenAI, file: bytes, **fields: Any) -> Any:
    extra = {"max_completion_tokens": NUM_TOKENS}
    return client.audio.transcriptions.create(model="whisper", file=file, language="en", extra_body=extra, **fields)


@pytest.mark.smoke
def test_a_transcription_has_the_greedy_tokens_of_transformers(
    release: Release, client: OpenAI, spans: Callable[[], list[Span]], folder: Path
) -> None:
    samples = tone(0, 0.7)
    *_, done = transcribe(client, encode(samples, RATE, "wav of floats"), stream=True, include=["logprobs"])
    assert [bytes(each.bytes or ()) for each in done.logprobs] == greedy_text(folder, samples, "en", NUM_TOKENS)
    assert release.gateway_metric('proa_gateway_audios_total{outcome="prepared"}') == 1
    (span,) = eventually("the span has been received", lambda: [each for each in spans() if each.name == "audio"])
    assert span.attributes["proa.audio.seconds"] == pytest.approx(0.7)


def test_files_are_decoded_within_the_pods_limits(release: Release, client: OpenAI) -> None:
    for name in ("flac", "mp3", "ogg opus", "m4a", "webm"):
        assert transcribe(client, encode(tone(0, 2.5), RATE, name)).usage.seconds == 3
    with pytest.raises(BadRequestError, match="Invalid or unsupported audio file"):
        transcribe(client, b"hello")
    assert release.gateway_metric("proa_gateway_audio_process_restarts_total") == 0
    (pod,) = release.pods("gateway")
    assert pod["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"]
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0


def test_a_killed_engine_loses_no_text_of_its_windows(release: Release, client: OpenAI) -> None:
    file = file_of(*range(200))
    *_, expected = transcribe(client, file, stream=True)
    events = transcribe(client, file, stream=True)
    next(events)
    doomed = release.pods("engine")[0]["metadata"]["name"]
    release.kill_at_next_work(doomed, "engine")
    *_, done = events
    assert done.text == expected.text
    assert release.gateway_metric('proa_gateway_failovers_total{outcome="resumed"}') > 0
    restarted = release.get("pod", doomed)["status"]["containerStatuses"][0]
    assert restarted["restartCount"] == 1
