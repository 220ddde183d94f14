"""Clients that each send the next request when the last one has ended: those of `proa bench serve`, with prompts of the
benchmarks. They know no server: whatever has the OpenAI API is measured by the same program."""

import asyncio
import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from multiprocessing.synchronize import Barrier
from typing import Any

import orjson

from benchmarks.engine.bench import PLAIN
from proa_cli.bench.client import Call, Sample, open_session, send
from proa_cli.bench.load import Load, run_load

Prompt = str | list[int]
_START_SECONDS = 60.0  # for all processes of clients to start
_together: Barrier  # of a process of clients: where it waits for the others


@dataclass(frozen=True, slots=True)
class Clients:
    """Prompts in turn, each with an output of exactly `max_tokens`, divided evenly among the servers at `urls`."""

    urls: Sequence[str]
    model: str
    number: int
    prompts: Sequence[Prompt]
    max_tokens: int
    seconds: float  # requests that have not ended then fail
    sampling: Mapping[str, Any] = field(default_factory=lambda: PLAIN)


@dataclass(frozen=True, slots=True)
class Outcome:
    samples: Sequence[Sample]
    cpu: float  # cores that the process of these clients used; of several the most


def run_clients(clients: Clients) -> Outcome:
    """Run all requests in this process."""
    return asyncio.run(_run_clients(clients))


def run_processes(clients: Clients, number: int) -> Outcome:
    """Run all requests in so many processes, which begin at the same time: one process writes down at most some 25,000
    events a second, so that a fast server would be measured by its client."""
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(number)
    with context.Pool(number, _set_barrier, (together,)) as pool:
        outcomes = pool.map(_run_together, shares(clients, number), chunksize=1)
    samples = [sample for outcome in outcomes for sample in outcome.samples]
    return Outcome(samples, max(outcome.cpu for outcome in outcomes))


def shares(clients: Clients, number: int) -> list[Clients]:
    """The clients and their prompts in `number` parts, each as large as another or larger by one."""
    return [
        replace(
            clients,
            number=len(range(index, clients.number, number)),
            prompts=clients.prompts[index::number],
            urls=[*clients.urls[index % len(clients.urls) :], *clients.urls[: index % len(clients.urls)]],
        )
        for index in range(number)
    ]


def _set_barrier(barrier: Barrier) -> None:
    global _together
    _together = barrier


def _run_together(clients: Clients) -> Outcome:
    _together.wait(_START_SECONDS)
    return run_clients(clients)


async def _run_clients(clients: Clients) -> Outcome:
    urls = cycle(f"{url}/v1/completions" for url in clients.urls)
    headers = {"Content-Type": "application/json"}
    calls = [Call(next(urls), _body(clients, prompt), headers, None) for prompt in clients.prompts]
    load = Load(calls, [0.0] * len(calls), clients.number, clients.seconds)
    async with open_session(clients.urls[0]) as session:
        measured = await run_load(load, partial(send, session), lambda sample: None, asyncio.Event())
    unfinished = [Sample(0.0, error=f"not ended after {clients.seconds:g} s")] * measured.unfinished
    return Outcome([*measured.samples, *unfinished], measured.elapsed.cpu)


def _body(clients: Clients, prompt: Prompt) -> bytes:
    body = {
        "model": clients.model,
        "prompt": prompt,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": clients.max_tokens,
        "ignore_eos": True,
    }
    return orjson.dumps({**body, **clients.sampling})


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
