"""Many concurrent streams through one gateway process: completeness, latencies, memory per stream.

A fake engine process sends every stream a token each step, at the pace of a large model. The clients run in two more
processes. Prints a Markdown table and one line of JSON. Exits with 1 if a stream failed or is incomplete, or if fewer
than `--streams` were ever open at once.

    PYTHONPATH=tests python -m benchmarks.http.streams --streams 1 1000
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.pool import Pool

import psutil

from benchmarks.http.closed_loop import Clients, Outcome, percentile, run_clients
from proa_cli.bench.metrics import most_at_once
from support.processes import fake_engine_process, gateway_process

_CLIENT_PROCESSES = 2


@dataclass(frozen=True, slots=True)
class Figure:
    """The result for one number of streams."""

    streams: int
    served: int  # streams that got every token
    at_once: int  # most streams between their first and last token at one moment
    seconds: float
    events_per_second: float
    time_to_first_token_p50: float  # seconds
    time_to_first_token_p99: float
    between_tokens_p50: float
    between_tokens_p99: float
    gateway_cpu: float  # cores
    files: int  # most open files of the gateway
    idle_mb: float
    peak_mb: float
    kb_a_stream: float


def measure(streams: int, arguments: argparse.Namespace) -> Figure:
    """Start a new engine and a new gateway, and run this number of streams."""
    batch = str(arguments.batch or streams)
    engine = ("--repeat", "--step-delay", str(arguments.step_delay), "--max-num-seqs", batch)
    with (
        multiprocessing.get_context("spawn").Pool(_CLIENT_PROCESSES) as clients,
        fake_engine_process(*engine) as (_, address),
        gateway_process(address, *arguments.gateway_argument) as (gateway, port),
    ):
        process = psutil.Process(gateway.pid)
        run(clients, port, 2, arguments)  # warm up: the first requests load modules
        idle, cpu, started = process.memory_info().rss, process.cpu_times(), time.monotonic()
        running = run_async(clients, port, streams, arguments)
        peak = files = 0
        while not running.ready():
            peak, files = max(peak, process.memory_info().rss), max(files, process.num_fds())
            running.wait(0.1)
        samples = [sample for outcome in running.get() for sample in outcome.samples]
        seconds, used = time.monotonic() - started, process.cpu_times()
    for error in sorted({sample.error for sample in samples if sample.error}):
        print("failed:", error)
    good = [sample for sample in samples if not sample.error and sample.output_tokens == arguments.max_tokens]
    first = [sample.ttft for sample in good]
    gaps = [gap for sample in good for gap in sample.gaps]
    return Figure(
        streams=streams,
        served=len(good),
        at_once=most_at_once([(sample.start + sample.ttft, sample.start + sample.latency) for sample in good]),
        seconds=round(seconds, 1),
        events_per_second=round((len(first) + len(gaps)) / seconds),
        time_to_first_token_p50=round(percentile(first, 0.5), 3),
        time_to_first_token_p99=round(percentile(first, 0.99), 3),
        between_tokens_p50=round(percentile(gaps, 0.5), 3),
        between_tokens_p99=round(percentile(gaps, 0.99), 3),
        gateway_cpu=round((used.user + used.system - cpu.user - cpu.system) / seconds, 2),
        files=files,
        idle_mb=round(idle / 1e6, 1),
        peak_mb=round(peak / 1e6, 1),
        kb_a_stream=round((peak - idle) / streams / 1e3, 1),
    )


def run_async(
    clients: Pool, port: int, streams: int, arguments: argparse.Namespace
) -> "multiprocessing.pool.MapResult[Outcome]":
    loads, url = [], f"http://127.0.0.1:{port}"
    for index in range(_CLIENT_PROCESSES):
        share = streams // _CLIENT_PROCESSES + (index < streams % _CLIENT_PROCESSES)
        prompts = [f"{index}. Tell me about number {turn}." for turn in range(share)]
        loads.append(Clients([url], "fake", share, prompts, arguments.max_tokens, arguments.seconds))
    return clients.map_async(run_clients, loads, chunksize=1)


def run(clients: Pool, port: int, streams: int, arguments: argparse.Namespace) -> None:
    run_async(clients, port, streams, arguments).get()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 1000])
    parser.add_argument("--batch", type=int, help="max_num_seqs of the engine (default: all streams)")
    parser.add_argument("--max-tokens", type=int, default=100, help="tokens of each stream")
    parser.add_argument("--step-delay", type=float, default=0.1, help="seconds between the engine's steps")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit for one number of streams")
    parser.add_argument(
        "--gateway-argument", action="append", default=[], help="argument for proa-gateway serve, may be repeated"
    )
    arguments = parser.parse_args(argv)
    measured = [measure(streams, arguments) for streams in arguments.streams]
    figures = [asdict(figure) for figure in measured]
    print("|", " | ".join(figures[0]), "|")
    print("|", " | ".join("---:" for _ in figures[0]), "|")
    for figure in figures:
        print("|", " | ".join(f"{value:,}" for value in figure.values()), "|")
    print(json.dumps(figures))
    return int(any(min(figure.served, figure.at_once) < figure.streams for figure in measured))


if __name__ == "__main__":
    sys.exit(main())
