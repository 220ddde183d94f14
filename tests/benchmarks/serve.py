"""A closed loop of streaming clients against a running gateway: throughput and latencies over HTTP.

Each client sends its next request when the last one has ended; the clients are spread over several processes. Bounded
in requests and in time. Prints a Markdown table and one line of JSON.

    python tests/benchmarks/serve.py --url http://127.0.0.1:8000 --clients 64 --requests 256
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit
from urllib.request import urlopen

_SUBJECTS = ("a river", "the moon", "bread", "a small boat", "the sea", "an old tree", "rain", "a long road")


@dataclass(slots=True)
class Sample:
    """What one request met; times in seconds."""

    time_to_first_token: float
    gaps: list[float] = field(default_factory=list)  # between events that carry text
    output_tokens: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """What one process does."""

    host: str
    port: int
    model: str
    clients: int
    requests: int
    max_tokens: int
    seconds: float
    seed: int


def run_load(load: Load) -> list[Sample]:
    return asyncio.run(_run_load(load))


async def _run_load(load: Load) -> list[Sample]:
    left = iter(range(load.requests))
    deadline = time.monotonic() + load.seconds
    draw = random.Random(load.seed)
    samples: list[Sample] = []

    async def client() -> None:
        for _ in left:
            if time.monotonic() > deadline:
                return
            prompt = f"Number {draw.randrange(10**6)}. Tell me about {draw.choice(_SUBJECTS)}."
            samples.append(await send(load, prompt, deadline))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(load.clients):
            tasks.create_task(client())
    return samples


async def send(load: Load, prompt: str, deadline: float) -> Sample:
    """One streamed chat completion. What goes wrong is a sample too."""
    body = {
        "model": load.model,
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": load.max_tokens,
        "temperature": 0,
    }
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {load.host}\r\nContent-Type: application/json\r\n"
    sample = Sample(0.0)
    started = last = time.monotonic()
    try:
        async with asyncio.timeout(max(1.0, deadline - started)):
            reader, writer = await asyncio.open_connection(load.host, load.port, limit=1 << 20)
            writer.write(f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
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
                if event.get("choices") and event["choices"][0]["delta"].get("content"):
                    if sample.time_to_first_token:
                        sample.gaps.append(now - last)
                    else:
                        sample.time_to_first_token = now - started
                    last = now
            writer.close()
    except (OSError, TimeoutError, IndexError, ValueError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    return sample


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def report(samples: Sequence[Sample], clients: int, seconds: float) -> None:
    good = [sample for sample in samples if not sample.error]
    first = [sample.time_to_first_token * 1e3 for sample in good]
    gaps = [gap * 1e3 for sample in good for gap in sample.gaps]
    tokens = sum(sample.output_tokens for sample in good)
    figures: dict[str, float] = {
        "clients": clients,
        "requests": len(good),
        "failed": len(samples) - len(good),
        "requests_per_second": round(len(good) / seconds, 2),
        "output_tokens_per_second": round(tokens / seconds, 1),
    }
    for name, values in (("ttft_ms", first), ("inter_token_ms", gaps)):
        for share in (0.5, 0.9, 0.99):
            figures[f"{name}_p{round(share * 100)}"] = round(percentile(values, share), 2)
    print("|", " | ".join(figures), "|")
    print("|", " | ".join("---:" for _ in figures), "|")
    print("|", " | ".join(f"{value:,}" for value in figures.values()), "|")
    for error in sorted({sample.error for sample in samples if sample.error}):
        print("failed:", error)
    print(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first that the gateway lists")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256, help="in all")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0, help="no request is sent after this, none outlives it")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    url = urlsplit(arguments.url)
    with urlopen(f"{arguments.url}/v1/models", timeout=10) as answer:
        model = arguments.model or json.load(answer)["data"][0]["id"]
    processes = min(arguments.processes, arguments.clients)
    clients, requests = arguments.clients, arguments.requests
    loads = [
        Load(
            host=url.hostname or "127.0.0.1",
            port=url.port or 80,
            model=model,
            clients=clients // processes + (index < clients % processes),
            requests=requests // processes + (index < requests % processes),
            max_tokens=arguments.max_tokens,
            seconds=arguments.seconds,
            seed=index,
        )
        for index in range(processes)
    ]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(_nothing, range(processes))  # they are up before the clock starts
        started = time.monotonic()
        samples = [sample for part in pool.map(run_load, loads, chunksize=1) for sample in part]
        report(samples, clients, time.monotonic() - started)


def _nothing(_: int) -> None:
    pass


if __name__ == "__main__":
    main()
