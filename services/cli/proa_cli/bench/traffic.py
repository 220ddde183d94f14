"""What a benchmark sends: the prompts of a dataset at their times, or the turns of sessions."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from proa_cli.bench.arrivals import arrival_times
from proa_cli.bench.client import Call, Sample
from proa_cli.bench.datasets import random_text
from proa_cli.bench.load import Load, Measured, Send, run_load
from proa_cli.bench.options import BenchServeOptions
from proa_cli.bench.prompts import make_prompts
from proa_cli.bench.requests import Requests, model_names
from proa_cli.bench.session_load import SessionLoad, run_sessions
from proa_cli.bench.session_prompts import read_trace
from proa_cli.bench.tokens import Tokenizer

Run = Callable[[Send, Callable[[Sample], None], asyncio.Event], Awaitable[Measured]]


@dataclass(frozen=True, slots=True)
class Traffic:
    """`first`: a request for checks and for warming up. `count`: of measured requests, one-shot prompts left out."""

    first: Call
    count: int
    run: Run


def make_traffic(
    options: BenchServeOptions, model: str, tokenizer: Tokenizer | None, headers: Mapping[str, str]
) -> Traffic:
    """Makes the prompts of a dataset, which may take a while; texts of sessions are made while they run.

    `model`: its name in the API. Raises `ValueError` for lengths and files that cannot be used.
    """
    name = options.dataset.dataset_name
    draw = np.random.default_rng([options.dataset.seed, 1])
    requests = Requests(
        options.server, headers, ignores_eos=options.server.ignore_eos or name in ("random", "sessions")
    )
    if name == "sessions":
        assert tokenizer is not None
        return _session_traffic(options, model, tokenizer, requests, draw)
    load = options.load
    prompts = make_prompts(options.dataset, tokenizer)
    names = model_names(options.server, model, len(prompts), draw)
    calls = [
        requests.make(each, [prompt.text], prompt.output_tokens, prompt.num_tokens)
        for each, prompt in zip(names, prompts, strict=True)
    ]
    times = arrival_times(len(calls), load.request_rate, load.burstiness, draw, load.ramp_up)
    timed = Load(calls, times, load.max_concurrency, load.max_seconds)
    return Traffic(calls[0], len(calls), lambda send, ended, stop: run_load(timed, send, ended, stop))


def _session_traffic(
    options: BenchServeOptions, model: str, tokenizer: Tokenizer, requests: Requests, draw: np.random.Generator
) -> Traffic:
    dataset, sessions = options.dataset, options.sessions
    trace = read_trace(sessions.session_trace) if sessions.session_trace is not None else ()
    load = SessionLoad(
        sessions.workload,
        sessions.sessions,
        min(dataset.num_prompts, sum(map(len, trace))) if trace else dataset.num_prompts,
        sessions.session_one_shots,
        options.load.max_seconds,
        dataset.seed,
        trace,
    )
    names = model_names(options.server, model, dataset.num_prompts, draw)  # at least as many as sessions

    def write(tokens: int, draw: np.random.Generator) -> str:
        return random_text(tokenizer, tokens, draw)

    def make_call(parts: Sequence[str], output_tokens: int, number: int) -> Call:
        header = sessions.session_header
        session = {header: f"{requests.prefix}session-{number}"} if header and number > 0 else {}
        return requests.make(names[number % len(names)], parts, output_tokens, None, session)

    first = make_call([write(16, draw)], 1, 0)
    return Traffic(first, load.turns, lambda send, ended, stop: run_sessions(load, write, make_call, send, ended, stop))
