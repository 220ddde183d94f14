"""Many streams at once through one gateway process: whether all are served, how evenly, and what memory each takes.

A fake engine process gives every stream a token each step, at a pace that a large model would have; the clients are in
two more processes. Bounded in requests and in time. Prints a Markdown table and one line of JSON. Exits with 1 where a
stream failed or was cut short, or where fewer were being answered at one moment than were asked for.

    PYTHONPATH=tests python tests/benchmarks/streams.py --streams 1 1000
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from multiprocessing.pool import Pool

import psutil
from closed_loop import Load, Sample, percentile, run_load

from support.processes import fake_engine_process, gateway_process

_CLIENT_PROCESSES = 2


@dataclass(frozen=True, slots=True)
class Figure:
    """What one number of streams gave."""

    streams: int
    served: int  # with every token
    at_once: int  # at most, from their first token to their last
    seconds: float
    events_per_second: float
    time_to_first_token_p50: float  # seconds
    time_to_first_token_p99: float
    between_tokens_p50: float
    between_tokens_p99: float
    gateway_cpu: float  # cores
    files: int  # open in the gateway, at most
    idle_mb: float
    peak_mb: float
    kb_a_stream: float


def measure(streams: int, arguments: argparse.Namespace) -> Figure:
    """A fresh engine and a fresh gateway for each number of streams."""
    batch = str(arguments.batch or streams)
    engine = ("--repeat", "--step-delay", str(arguments.step_delay), "--max-num-seqs", batch)
    with (
        multiprocessing.get_context("spawn").Pool(_CLIENT_PROCESSES) as clients,
        fake_engine_process(*engine) as (_, address),
        gateway_process(address, *arguments.gateway_argument) as (gateway, port),
    ):
        process = psutil.Process(gateway.pid)
        run(clients, port, 2, arguments)  # what the first requests load is not the streams'
        idle, cpu, started = process.memory_info().rss, process.cpu_times(), time.monotonic()
        running = run_async(clients, port, streams, arguments)
        peak = files = 0
        while not running.ready():
            peak, files = max(peak, process.memory_info().rss), max(files, process.num_fds())
            running.wait(0.1)
        samples = [sample for part in running.get() for sample in part]
        seconds, used = time.monotonic() - started, process.cpu_times()
    for error in sorted({sample.error for sample in samples if sample.error}):
        print("failed:", error)
    good = [sample for sample in samples if not sample.error and sample.output_tokens == arguments.max_tokens]
    first = [sample.time_to_first_token for sample in good]
    gaps = [gap for sample in good for gap in sample.gaps]
    return Figure(
        streams=streams,
        served=len(good),
        at_once=most_at_once([(sample.first_token_at, sample.last_token_at) for sample in good]),
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


def most_at_once(intervals: Sequence[tuple[float, float]]) -> int:
    """How many of them have a moment in common."""
    steps = sorted([(start, 1) for start, _ in intervals] + [(end, -1) for _, end in intervals])
    return max(accumulate((step for _, step in steps), initial=0))


def run_async(
    clients: Pool, port: int, streams: int, arguments: argparse.Namespace
) -> "multiprocessing.pool.MapResult[list[Sample]]":
    loads = []
    for index in range(_CLIENT_PROCESSES):
        share = streams // _CLIENT_PROCESSES + (index < streams % _CLIENT_PROCESSES)
        prompts = [f"{index}. Tell me about number {turn}." for turn in range(share)]
        loads.append(Load(port, "fake", share, prompts, arguments.max_tokens, arguments.seconds))
    return clients.map_async(run_load, loads, chunksize=1)


def run(clients: Pool, port: int, streams: int, arguments: argparse.Namespace) -> None:
    run_async(clients, port, streams, arguments).get()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 1000])
    parser.add_argument("--batch", type=int, help="sequences that the engine runs at once; default: all of them")
    parser.add_argument("--max-tokens", type=int, default=100, help="of each stream")
    parser.add_argument("--step-delay", type=float, default=0.1, help="seconds between tokens, at best")
    parser.add_argument("--seconds", type=float, default=120.0, help="nothing outlives this")
    parser.add_argument("--gateway-argument", action="append", default=[], help="for proa-gateway serve; repeat")
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
