"""`proa bench serve`: sends requests to a running server, Proa's or another of the OpenAI API, and prints latencies and
throughput."""

import argparse
import asyncio
import gc
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from tqdm import tqdm

from proa.options import add_options, from_arguments
from proa_cli.bench import metrics, report, vllm
from proa_cli.bench.client import Call, Sample, message_of, open_session, send
from proa_cli.bench.load import Load, Measured, run_load, stopped_by
from proa_cli.bench.options import BenchServeOptions, ServerOptions
from proa_cli.bench.requests import request_headers
from proa_cli.bench.tokens import Tokenizer, find_tokenizer
from proa_cli.bench.traffic import Traffic, make_traffic

_RETRY_SECONDS = 1.0
_LIST_SECONDS = 10.0  # for the list of models, which a server has at once
_BUSY_CLIENT = 0.8  # cores of this process, above which its own speed may be what is measured


@dataclass(frozen=True, slots=True)
class _Model:
    """`name`: in the API. `source`: the folder or hub id that the tokenizer may be read from."""

    name: str
    source: str


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    add_options(parser, BenchServeOptions)
    try:
        words = vllm.expanded(words, set(parser._option_string_actions))
        return asyncio.run(_run(from_arguments(BenchServeOptions, parser.parse_args(words))))
    except aiohttp.ClientConnectorError as error:
        reason = f"no server answers at {error.host}:{error.port}: {error.strerror}"
    except (ValueError, OSError, aiohttp.ClientError) as error:
        reason = str(error) or type(error).__name__
    print(f"{parser.prog}: error: {reason}", file=sys.stderr)
    return 1


async def _run(options: BenchServeOptions) -> int:
    """Returns the exit status: 1 if no request succeeded."""
    server, load = options.server, options.load
    if options.results.is_saved:
        _make_folder(options.results.result_dir)
    headers = request_headers(server)
    async with open_session(server.url, verify=not server.insecure) as session:
        model = await _find_model(session, server, headers)
        tokenizer, traffic = await asyncio.to_thread(_make_traffic, options, model, headers)
        await _wait_until_ready(session, traffic.first, load.ready_check_timeout_sec)
        await _warm_up(session, traffic.first, load.num_warmups, load.max_concurrency)
        measured = await _measure(session, traffic, is_quiet=options.results.disable_tqdm)
    figures = metrics.summarize(
        measured.samples, measured.elapsed.seconds, options.results.metric_percentiles, dict(options.results.goodput)
    )
    shown, limit, rate = options.results.shown, load.max_concurrency, load.request_rate
    print(report.table(figures, shown, measured.sections, max_concurrency=limit, request_rate=rate))
    for note in notes(figures, measured):
        print(note)
    if options.results.is_saved:
        run = {**_settings(options, model.source, tokenizer), **dict(options.results.metadata), **_traffic(options)}
        detailed = options.results.save_detailed
        results = report.document(figures, measured, options.results.shown, run, detailed=detailed)
        path = options.results.result_dir / (options.results.result_filename or _file_name(options, model.source))
        report.save(path, results, append=options.results.append_result)
        print(f"Results: {path}")
    return 0 if figures.completed else 1


def _make_folder(path: Path) -> None:
    """Called before anything is measured. Raises `ValueError`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--result-dir {path}: {error.strerror}") from None


async def _find_model(session: aiohttp.ClientSession, server: ServerOptions, headers: Mapping[str, str]) -> _Model:
    """Raises `ValueError` if the model is not named and the server lists none."""
    if server.model is not None:
        return _Model(server.served_model_name or server.model, server.model)
    timeout = aiohttp.ClientTimeout(total=_LIST_SECONDS)
    try:
        async with session.get(f"{server.url}/v1/models", headers=headers, timeout=timeout) as response:
            body = await response.read()
    except TimeoutError:
        raise ValueError(f"{server.url}/v1/models does not answer within {_LIST_SECONDS:g} s") from None
    if response.status == HTTPStatus.UNAUTHORIZED:
        raise ValueError(f"{message_of(body).rstrip('.')}; the variable PROA_API_KEY has the key, or a --header")
    try:
        listed = orjson.loads(body)["data"][0]
    except (ValueError, KeyError, IndexError, TypeError):
        hint = "leave /v1 out of --base-url" if server.url.endswith("/v1") else "give --model"
        raise ValueError(f"{server.url}/v1/models lists no model: {message_of(body).rstrip('.')}; {hint}") from None
    return _Model(server.served_model_name or listed["id"], listed.get("root") or listed["id"])


def _make_traffic(
    options: BenchServeOptions, model: _Model, headers: Mapping[str, str]
) -> tuple[Tokenizer | None, Traffic]:
    """The tokenizer is None if the prompts need none."""
    server, dataset = options.server, options.dataset
    tokenizer = None
    if dataset.dataset_name != "custom" or not (server.is_chat or dataset.skip_chat_template):
        tokenizer = find_tokenizer(server.tokenizer, model.source, model.name, server.url, headers)
    print(f"Model: {model.name}, tokenizer: {tokenizer.name if tokenizer else 'not needed'}", flush=True)
    return tokenizer, make_traffic(options, model.name, tokenizer, headers)


async def _wait_until_ready(session: aiohttp.ClientSession, call: Call, seconds: float) -> None:
    """Send the request until it succeeds. Raises `ValueError` if it has not in time."""
    if not seconds:
        return
    deadline = time.monotonic() + seconds
    while (sample := await send(session, call)).error:
        if time.monotonic() + _RETRY_SECONDS > deadline:
            raise ValueError(f"no request succeeded in {seconds:g} s (--ready-check-timeout-sec): {sample.error}")
        await asyncio.sleep(_RETRY_SECONDS)


async def _warm_up(session: aiohttp.ClientSession, call: Call, count: int, max_concurrency: int | None) -> None:
    if count:
        load = Load([call] * count, [0.0] * count, max_concurrency, float("inf"))
        with stopped_by() as never:
            await run_load(load, lambda call: send(session, call), lambda sample: None, never)


async def _measure(session: aiohttp.ClientSession, traffic: Traffic, *, is_quiet: bool) -> Measured:
    """Show the progress; Ctrl-C ends the run, and what was measured is returned."""
    tokens = 0
    gc.collect()
    gc.freeze()  # what is there stays: it need not be looked through while times are taken
    with (
        tqdm(total=traffic.count, unit="req", disable=is_quiet or None) as bar,
        stopped_by(signal.SIGINT, signal.SIGTERM) as stop,
    ):

        def ended(sample: Sample) -> None:
            nonlocal tokens
            tokens += sample.output_tokens
            bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-9):,.0f} tok/s", refresh=False)
            bar.update()

        return await traffic.run(lambda call: send(session, call), ended, stop)


def notes(figures: metrics.Metrics, measured: Measured) -> Iterator[str]:
    """Sentences about what the table does not say."""
    if errors := [sample.error for sample in measured.samples if sample.error]:
        yield f"{len(errors)} requests failed, the first with: {errors[0]}"
    if measured.unfinished:
        yield f"{measured.unfinished} requests had not ended, or were not sent, when the run was stopped."
    if figures.output_tokens > 1.05 * figures.chunks > 0:
        yield (
            f"A chunk had {figures.output_tokens / figures.chunks:.2f} tokens on average: ITL is the time between "
            "chunks, TPOT that of a token."
        )
    if count := sum(not sample.has_usage for sample in measured.samples if not sample.error):
        yield f"{count} responses had no usage: a chunk counts as one output token, prompts as they were made."
    if measured.elapsed.cpu > _BUSY_CLIENT:
        yield (
            f"This client used {measured.elapsed.cpu:.2f} cores of at most one: its own speed may be what was "
            "measured. Run several beside each other, each with a part of the load."
        )


def _settings(options: BenchServeOptions, model: str, tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.server.backend,
        "backend": options.server.backend,
        "label": options.results.label,
        "model_id": model,
        "tokenizer_id": tokenizer.name if tokenizer else None,
        "num_prompts": options.dataset.num_prompts,
    }


def _traffic(options: BenchServeOptions) -> dict[str, Any]:
    load = options.load
    traffic: dict[str, Any] = {
        "request_rate": _finite(load.request_rate),
        "burstiness": _finite(load.burstiness.shape),
        "max_concurrency": load.max_concurrency,
    }
    if load.ramp_up_strategy is not None:
        traffic |= {
            "ramp_up_strategy": load.ramp_up_strategy,
            "ramp_up_start_rps": load.ramp_up_start_rps,
            "ramp_up_end_rps": load.ramp_up_end_rps,
        }
    return traffic


def _finite(number: float | None) -> float | str:
    """JSON has no infinity, which None is too."""
    return "inf" if number is None or number == float("inf") else number


def _file_name(options: BenchServeOptions, model: str) -> str:
    load = options.load
    rate = f"{_finite(load.request_rate)}qps"
    if load.ramp_up_strategy is not None:
        rate = f"ramp-up-{load.ramp_up_strategy}-{load.ramp_up_start_rps}qps-{load.ramp_up_end_rps}qps"
    parts = [options.results.label or options.server.backend, rate]
    parts += [] if load.max_concurrency is None else [f"concurrency{load.max_concurrency}"]
    parts += [Path(model).name, datetime.now().strftime("%Y%m%d-%H%M%S")]
    return "-".join(parts) + ".json"
