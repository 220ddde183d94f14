"""Clients that each send the next request when the last one has ended: those of `proa bench serve`, with prompts of the
benchmarks."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import orjson

from proa_cli.bench.client import Call, Sample, open_session, send
from proa_cli.bench.load import Load, run_load

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Clients:
    """Prompts in turn, each with an output of exactly `max_tokens`, divided evenly among the gateways at `ports`."""

    ports: Sequence[int]
    model: str
    number: int
    prompts: Sequence[Prompt]
    max_tokens: int
    seconds: float  # requests that have not ended then fail


def run_clients(clients: Clients) -> tuple[list[Sample], float]:
    """Run all requests in this process; returns their samples, and the seconds that all took."""
    return asyncio.run(_run_clients(clients))


async def _run_clients(clients: Clients) -> tuple[list[Sample], float]:
    urls = cycle(f"http://127.0.0.1:{port}/v1/completions" for port in clients.ports)
    headers = {"Content-Type": "application/json"}
    calls = [Call(next(urls), _body(clients, prompt), headers, None) for prompt in clients.prompts]
    load = Load(calls, [0.0] * len(calls), clients.number, clients.seconds)
    async with open_session(f"http://127.0.0.1:{clients.ports[0]}") as session:
        measured = await run_load(load, partial(send, session), lambda sample: None, asyncio.Event())
    unfinished = [Sample(0.0, error=f"not ended after {clients.seconds:g} s")] * measured.unfinished
    return [*measured.samples, *unfinished], measured.seconds


def _body(clients: Clients, prompt: Prompt) -> bytes:
    body = {
        "model": clients.model,
        "prompt": prompt,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": clients.max_tokens,
        "ignore_eos": True,
        "temperature": 0.6,
    }
    return orjson.dumps(body)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
