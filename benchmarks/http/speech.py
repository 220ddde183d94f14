"""What transcriptions do to chats beside them, over HTTP on this machine.

Clients in a process of their own read chats as streams, of a model that answers every 20 ms. Others, in another one,
send audio files one after the other to a small Whisper model with random weights. Both engines, the gateway and what
decodes the files are processes too. Rounds without audio and with it alternate. Prints the gaps between the streams'
tokens, what was transcribed, and the processor time of each.

    PYTHONPATH=tests python -m benchmarks.http.speech
    PYTHONPATH=tests python -m benchmarks.http.speech --clients 2 --streams 2 --audio-seconds 600

`--builtin`: the chats are of the built-in model, whose engine needs a core for itself.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from benchmarks.http.burst import follow, in_ms, post

_BOUNDARY = "speech"
_WINDOW_SECONDS = 30


def transcription(file: bytes) -> bytes:
    """The request for a file's text."""
    head = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{{}}"\r\n\r\n'
    fields = {"model": "whisper", "language": "en", "temperature": "0.5", "max_completion_tokens": "40"}
    form = "".join(f"{head.format(name)}{value}\r\n" for name, value in fields.items()) + head.format("file")
    body = form.encode() + file + f"\r\n--{_BOUNDARY}--\r\n".encode()
    start = "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    start += f"Content-Type: multipart/form-data; boundary={_BOUNDARY}\r\nContent-Length: {len(body)}\r\n\r\n"
    return start.encode() + body


def streams(port: int, model: str, count: int, connection: Connection) -> None:
    """A process: sends the gaps between tokens since the last question whenever it is asked."""

    async def run() -> None:
        gaps: list[float] = []
        tasks = [asyncio.create_task(follow(port, model, gaps)) for _ in range(count)]
        while await asyncio.to_thread(connection.recv):
            connection.send(gaps)
            gaps.clear()
        for task in tasks:
            task.cancel()

    asyncio.run(run())


async def transcribe(port: int, request: bytes, clients: int, seconds: float) -> Counter[int]:
    """The answers by status, 0 if there was none. The last ones end later."""
    statuses: Counter[int] = Counter()
    deadline = time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < deadline:
            try:
                status, _ = await post(port, request)
            except ConnectionResetError:  # answered before the file was read
                status = 0
            statuses[status] += 1

    await asyncio.gather(*(client() for _ in range(clients)))
    return statuses


def cpu_seconds(pid: int) -> tuple[float, float]:
    """Of a process, and of its descendants, also those that have ended."""
    of_process, of_children = psutil.Process(pid).cpu_times(), 0.0
    for child in psutil.Process(pid).children():
        times = child.cpu_times()
        of_children += times.user + times.system + times.children_user + times.children_system
    return of_process.user + of_process.system, of_children


def measure(port: int, model: str, pids: dict[str, int], request: bytes, options: argparse.Namespace) -> None:
    ours, theirs = get_context("spawn").Pipe()
    child = get_context("spawn").Process(target=streams, args=(port, model, options.streams, theirs), daemon=True)
    child.start()
    try:
        asyncio.run(transcribe(port, request, 1, 0.1))  # starts what decodes
        for clients in (0, options.clients) * options.rounds:
            time.sleep(1)
            ours.send(True)
            ours.recv()
            before, started = {name: cpu_seconds(pid) for name, pid in pids.items()}, time.monotonic()
            if clients:
                statuses = asyncio.run(transcribe(port, request, clients, options.seconds))
            else:
                time.sleep(options.seconds)
                statuses = Counter()
            seconds = time.monotonic() - started
            after = {name: cpu_seconds(pid) for name, pid in pids.items()}
            spent = {name: after[name][0] - before[name][0] for name in pids}
            spent["decoding"] = after["gateway"][1] - before["gateway"][1]
            ours.send(True)
            cpu = ", ".join(f"{name} {each / seconds:.2f}" for name, each in spent.items())
            done = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items())) or "no audio"
            speed = statuses[200] * options.audio_seconds / seconds
            print(f"{done} ({speed:.0f} s of audio a second): gaps {in_ms(ours.recv())}; cores: {cpu}", flush=True)
        ours.send(False)
    finally:
        child.kill()


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--builtin", action="store_true", help="chats of the built-in model")
    parser.add_argument("--clients", type=int, default=32, help="that send audio files")
    parser.add_argument("--streams", type=int, default=32, help="of chats")
    parser.add_argument("--audio-seconds", type=int, default=60, help="of each file")
    parser.add_argument("--format", default="mp3", help="of the files, such as wav, flac, mp3, ogg opus")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args(argv)
    from support.audio_files import encode, tone
    from support.processes import engine_process, fake_engine_process, gateway_process, wait_for_engines
    from support.whisper_models import make_whisper

    with ExitStack() as stack:
        folder = make_whisper(Path(stack.enter_context(tempfile.TemporaryDirectory())), window_seconds=_WINDOW_SECONDS)
        flags = (f"--model={folder}", "--served-model-name=whisper", "--kv-cache-memory-bytes=268435456")
        whisper, first = stack.enter_context(engine_process(*flags, env={"OMP_NUM_THREADS": "1"}))
        if options.builtin:
            engine, second = stack.enter_context(engine_process("--model=builtin", env={"OMP_NUM_THREADS": "1"}))
        else:
            engine, second = stack.enter_context(fake_engine_process("--repeat", "--step-delay", "0.02"))
        gateway, port = stack.enter_context(gateway_process(first, "--engine", second))
        wait_for_engines(port, 2)
        pids = {"gateway": gateway.pid, "chats' engine": engine.pid, "Whisper's": whisper.pid}
        samples = tone(options.audio_seconds, 44_100)
        request = transcription(encode(samples, 44_100, options.format))
        measure(port, "proa-builtin" if options.builtin else "fake", pids, request, options)


if __name__ == "__main__":
    main(sys.argv[1:])
