"""What a burst of large JSON schemas does to itself and to streams beside it, over HTTP on this machine.

Sends `--requests` distinct schemas of about 60 KB at once, beside `--streams` streams of text and one client that sends
one small constraint after another, in rounds that alternate with bursts of the same bodies without a constraint
(`metadata`). Reports the answers by status with the slowest of each, the gaps between the streams' tokens and the times
of the small constraints in ms, and the processor time of gateway and engine. Ends by itself after `--rounds`.

    PYTHONPATH=tests python -m benchmarks.http.burst --fake
    PYTHONPATH=tests python -m benchmarks.http.burst

`--fake`: an engine without a model that answers every 20 ms, so that only the gateway is measured; else the built-in
model's.
"""

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from http import HTTPStatus
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import psutil

from benchmarks.http.closed_loop import percentile
from support.processes import engine_process, fake_engine_process, gateway_process

NUM_PROPERTIES = 850
PROBE_SECONDS = 4.0
PAUSE = 0.02  # seconds between small constraints


def schema(number: int) -> dict[str, Any]:
    """About 60 KB; no two numbers give the same."""
    names = [f"property_{number}_{index}" for index in range(NUM_PROPERTIES)]
    properties = {name: {"type": "string", "maxLength": 10 + index} for index, name in enumerate(names)}
    return {"type": "object", "properties": properties, "required": names}


def http_post(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def follow(port: int, model: str, gaps: list[float]) -> None:
    """One endless stream; adds the seconds between its events."""
    # What a model says after its end is often special tokens, which have no events unless they are text.
    fields = {"max_tokens": 400, "ignore_eos": True, "skip_special_tokens": False}
    body = {"model": model, "prompt": "Hello", "stream": True, **fields}
    request = http_post("/v1/completions", body)
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request)
            before = None
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    if before is not None:
                        gaps.append(now - before)
                    before = now
        finally:
            writer.close()


async def send_small(port: int, model: str, times: list[float]) -> None:
    """Small constraints, each another one; adds the seconds until each answer."""
    for number in itertools.count():
        fields = {"prompt": "Hi", "max_tokens": 1, "guided_choice": [f"choice {number}", "another"]}
        status, seconds = await post(port, http_post("/v1/completions", {"model": model, **fields}))
        if status != HTTPStatus.OK:
            raise SystemExit(f"a small constraint was answered {status}")
        times.append(seconds)
        await asyncio.sleep(PAUSE)


def streams(port: int, model: str, count: int, connection: Connection) -> None:
    """A process: sends the gaps between tokens and the times of small constraints since the last question whenever it
    is asked; False ends it."""

    async def run() -> None:
        gaps: list[float] = []
        times: list[float] = []
        tasks = [asyncio.create_task(follow(port, model, gaps)) for _ in range(count)]
        tasks.append(asyncio.create_task(send_small(port, model, times)))
        while await asyncio.to_thread(connection.recv):
            connection.send((gaps, times))
            gaps.clear()
            times.clear()
        for task in tasks:
            task.cancel()

    asyncio.run(run())


async def post(port: int, request: bytes) -> tuple[int, float]:
    """Status, and the seconds until the whole answer is there."""
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ", 2)[1]), time.perf_counter() - started


async def burst(port: int, requests: Sequence[bytes]) -> list[tuple[int, float]]:
    return await asyncio.gather(*(post(port, request) for request in requests))


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def beside(connection: Connection) -> str:
    """What the streams and the small constraints saw since the last call."""
    connection.send(True)
    gaps, times = connection.recv()
    return f"gaps {in_ms(gaps)}, small constraints {in_ms(times)}"


def in_ms(seconds: Sequence[float]) -> str:
    if not seconds:
        return "none"
    values = sorted(seconds)
    shown = (f"p{round(100 * share)} {1e3 * percentile(values, share):.0f}" for share in (0.5, 0.99))
    return f"{' '.join(shown)} max {1e3 * values[-1]:.0f} ms of {len(values)}"


def measure(port: int, model: str, pids: dict[str, int], options: argparse.Namespace) -> None:
    ours, theirs = get_context("spawn").Pipe()
    child = get_context("spawn").Process(target=streams, args=(port, model, options.streams, theirs), daemon=True)
    child.start()
    try:
        time.sleep(PROBE_SECONDS)
        for number in range(options.rounds):
            for field in ("metadata", "guided_json"):
                bodies = [
                    http_post("/v1/completions", {"model": model, "prompt": "Hi", "max_tokens": 3, field: schema(each)})
                    for each in range(number * options.requests, (number + 1) * options.requests)
                ]
                beside(ours)
                time.sleep(PROBE_SECONDS)
                print(f"idle: {beside(ours)}", flush=True)
                before = {name: cpu_seconds(pid) for name, pid in pids.items()}
                answers = asyncio.run(burst(port, bodies))
                cpu = ", ".join(f"{name} {cpu_seconds(pid) - before[name]:.2f} s" for name, pid in pids.items())
                seconds = sorted(seconds for _, seconds in answers)
                slowest: dict[int, float] = {}
                for status, each in answers:
                    slowest[status] = max(each, slowest.get(status, 0.0))
                statuses = ", ".join(
                    f"{count} x {status} (slowest {slowest[status]:.2f} s)"
                    for status, count in sorted(Counter(status for status, _ in answers).items())
                )
                print(
                    f"{field}: {statuses}, median {seconds[len(seconds) // 2]:.2f} s, {beside(ours)}, CPU: {cpu}",
                    flush=True,
                )
        ours.send(False)
    finally:
        child.kill()


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", action="store_true", help="an engine without a model")
    parser.add_argument("--requests", type=int, default=200, help="of one burst")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args(argv)
    with ExitStack() as stack:
        if options.fake:
            engine, address = stack.enter_context(fake_engine_process("--repeat", "--step-delay", "0.02"))
        else:
            engine, address = stack.enter_context(engine_process("--model=builtin", env={"OMP_NUM_THREADS": "1"}))
        gateway, port = stack.enter_context(gateway_process(address))
        model = "fake" if options.fake else "proa-builtin"
        measure(port, model, {"gateway": gateway.pid, "engine": engine.pid}, options)


if __name__ == "__main__":
    main(sys.argv[1:])
