"""A tiny Whisper model in two engine processes behind a gateway, asked by OpenAI's clients.

Streams have the greedy text of `transformers` for the same audio; a killed engine loses none of it.
"""

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

from support.audio_files import encode
from support.processes import engine_process, free_port, gateway_process, wait_for_engines
from support.scrape import Scrape
from support.whisper_models import RATE, file_of, greedy_text, make_whisper, tone

NUM_TOKENS = 24
SIZE = ("--num-gpu-blocks-override=256", "--max-num-seqs=8")


@dataclass(frozen=True)
class Service:
    folder: Path
    url: str
    engines: list[subprocess.Popen[bytes]]
    metrics_ports: list[int]

    def running(self, index: int) -> float:
        """Requests that an engine runs."""
        port = self.metrics_ports[index]
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10, verify=False).text
        return Scrape(text).value("vllm:num_requests_running")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = make_whisper(tmp_path_factory.mktemp("whisper"))
    with ExitStack() as stack:
        ports = [free_port(), free_port()]
        command = (f"--model={folder}", "--served-model-name=whisper", *SIZE)
        engines = [
            stack.enter_context(engine_process(*command, f"--metrics-port={port}", env={"OMP_NUM_THREADS": "1"}))
            for port in ports
        ]
        (_, first), (_, second) = engines
        _, port = stack.enter_context(gateway_process(first, "--engine", second))
        wait_for_engines(port, 2)
        yield Service(folder, f"http://127.0.0.1:{port}", [process for process, _ in engines], ports)


@pytest.fixture
def client(service: Service) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def stream(client: OpenAI, file: bytes, **fields: Any) -> tuple[str, str]:
    """The text of a stream's deltas, and of its last event."""
    fields = {"language": "en", "extra_body": {"max_completion_tokens": NUM_TOKENS}} | fields
    events = list(client.audio.transcriptions.create(model="whisper", file=file, stream=True, **fields))
    done = events.pop()
    assert done.type == "transcript.text.done"
    return "".join(event.delta for event in events if event.type == "transcript.text.delta"), done.text


@pytest.mark.parametrize(("seed", "language"), [(0, "en"), (6, "en"), (1, "de"), (5, "de")])
def test_a_streams_tokens_are_the_greedy_ones_of_transformers(
    service: Service, client: OpenAI, seed: int, language: str
) -> None:
    samples = tone(seed, 0.7 + seed / 20)
    fields: Any = {"language": language, "include": ["logprobs"], "extra_body": {"max_completion_tokens": NUM_TOKENS}}
    file = encode(samples, RATE, "wav of floats")
    *_, done = client.audio.transcriptions.create(model="whisper", file=file, stream=True, **fields)
    assert done.type == "transcript.text.done"
    assert [bytes(each.bytes or ()) for each in done.logprobs or ()] == greedy_text(
        service.folder, samples, language, NUM_TOKENS
    )


@pytest.mark.parametrize("name", ["flac", "mp3", "ogg opus", "m4a", "webm"])
def test_files_of_all_formats_are_transcribed(client: OpenAI, name: str) -> None:
    file = encode(tone(0, 2.5), RATE, name)
    created = client.audio.transcriptions.create(model="whisper", file=file, temperature=0.5)
    assert created.usage is not None
    assert created.usage.model_dump() == {"type": "duration", "seconds": 3}


async def test_both_clients_read_all_formats(service: Service, client: OpenAI) -> None:
    file = file_of(1, 2, 3)
    async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60) as other:
        for format in ("json", "text", "srt", "vtt", "verbose_json"):
            extra = {"seed": 5, "max_completion_tokens": 8}
            fields: Any = {"model": "whisper", "file": file, "response_format": format, "extra_body": extra}
            first = client.audio.transcriptions.create(**fields)
            second = await other.audio.transcriptions.create(**fields)
            if format == "verbose_json":
                assert first.language in ("english", "german")
                times = [time for each in first.segments for time in (each.start, each.end)]
                assert times == sorted(times)
                assert times[-1] <= first.duration == pytest.approx(2.5)
            assert first == second


def test_requests_that_cannot_be_answered_are_refused(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="Invalid or unsupported audio file"):
        client.audio.transcriptions.create(model="whisper", file=b"hello")
    with pytest.raises(BadRequestError, match="does not know the language 'xx', only de, en"):
        client.audio.transcriptions.create(model="whisper", file=file_of(1), language="xx")
    with pytest.raises(NotFoundError):
        client.chat.completions.create(model="whisper", messages=[{"role": "user", "content": "Hi"}])


async def test_many_clients_get_the_texts_that_each_gets_alone(service: Service, client: OpenAI) -> None:
    alone = {seed: stream(client, file_of(seed))[1] for seed in range(4)}
    with ThreadPoolExecutor(16) as executor:
        found = list(executor.map(lambda number: stream(client, file_of(number % 4))[1], range(32)))
    assert found == [alone[number % 4] for number in range(32)]


def test_a_killed_engine_loses_no_text_of_its_windows(service: Service, client: OpenAI) -> None:
    file = file_of(*range(24))
    _, expected = stream(client, file)
    with client.audio.transcriptions.with_streaming_response.create(
        model="whisper", file=file, stream=True, language="en", extra_body={"max_completion_tokens": NUM_TOKENS}
    ) as response:
        lines = response.iter_lines()
        next(lines)
        service.engines[max((0, 1), key=service.running)].kill()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert events[-1]["type"] == "transcript.text.done"
    assert events[-1]["text"] == expected
    assert [process.poll() is None for process in service.engines].count(True) == 1
