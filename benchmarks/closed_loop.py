"""A closed loop of streaming clients: each sends its next request when the last one has ended.

The clients are spread over several processes, so that they are not what is measured. Bounded in requests and in time.
Knows neither what is asked nor who answers.
"""

import asyncio
import json
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

Prompt = str | list[int]


@dataclass(slots=True)
class Sample:
    """What one request met; times in seconds."""

    time_to_first_token: float  # 0: its answer had no text
    first_token_at: float = 0.0  # `time.monotonic`, which all processes of a machine share
    last_token_at: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between events that carry text
    output_tokens: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """What one process does: the prompts in turn, all outputs as long as may be."""

    port: int
    model: str
    clients: int
    prompts: Sequence[Prompt]
    max_tokens: int
    seconds: float  # no request is sent after this, none outlives it


def run_load(load: Load) -> list[Sample]:
    return asyncio.run(_run_load(load))


def run_loads(loads: Sequence[Load]) -> tuple[list[Sample], float]:
    """Each in a process of its own; what all met, and the seconds it took."""
    with multiprocessing.get_context("spawn").Pool(len(loads)) as pool:
        pool.map(_nothing, range(len(loads)), chunksize=1)  # they are up before the clock starts
        started = time.monotonic()
        samples = [sample for part in pool.map(run_load, loads, chunksize=1) for sample in part]
        return samples, time.monotonic() - started


async def _run_load(load: Load) -> list[Sample]:
    left = iter(load.prompts)
    deadline = time.monotonic() + load.seconds
    samples: list[Sample] = []

    async def client() -> None:
        for prompt in left:
            if time.monotonic() > deadline:
                return
            samples.append(await _send(load, prompt, deadline))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(load.clients):
            tasks.create_task(client())
    return samples


async def _send(load: Load, prompt: Prompt, deadline: float) -> Sample:
    """One streamed completion. What goes wrong is a sample too."""
    body = {
        "model": load.model,
        "prompt": prompt,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": load.max_tokens,
        "ignore_eos": True,
        "temperature": 0.6,
    }
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\nConnection: close\r\n"
    sample = Sample(0.0)
    started = last = time.monotonic()
    try:
        async with asyncio.timeout(max(1.0, deadline - started)):
            reader, writer = await asyncio.open_connection("127.0.0.1", load.port, limit=1 << 20)
            writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            status = (await reader.readline()).split()[1]
            if status != b"200":
                sample.error = f"HTTP {status.decode()}"
            while line := await reader.readline():
                if not line.startswith(b"data: {"):
                    continue
                now = time.monotonic()
                event = json.loads(line[6:])
                if "error" in event:
                    sample.error = str(event["error"])
                if usage := event.get("usage"):
                    sample.output_tokens = usage["completion_tokens"]
                if event.get("choices") and event["choices"][0].get("text"):
                    if sample.time_to_first_token:
                        sample.gaps.append(now - last)
                    else:
                        sample.time_to_first_token, sample.first_token_at = now - started, now
                    last = sample.last_token_at = now
            writer.close()
    except (OSError, TimeoutError, IndexError, ValueError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    return sample


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def _nothing(_: int) -> None:
    pass
