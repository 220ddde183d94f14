"""SSE events per second of one gateway process, with one token an event, beside a bare uvicorn application.

A fake engine process sends one message a step, as fast as the gateway reads. The bare application (`bare_server.py`)
writes ready-made events of the same size, one a stream a step. A client process on raw sockets counts the events of
either (`event_counter.py`). The two take turns, so that changes of the machine's speed affect both.

All processes share the machine's cores: compare events per second of the servers' own CPU time.

    PYTHONPATH=tests python -m benchmarks.http.sse --streams 1 64 256
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import psutil

from support.processes import accepts, fake_engine_process, free_port, gateway_process, process


@dataclass(slots=True)
class Sample:
    """What a server wrote. Seconds of the clock, and of CPU time."""

    events: int = 0
    seconds: float = 0.0
    server_cpu: float = 0.0
    client_cpu: float = 0.0
    engine_cpu: float = 0.0

    def add(self, other: "Sample") -> None:
        self.events += other.events
        self.seconds += other.seconds
        self.server_cpu += other.server_cpu
        self.client_cpu += other.client_cpu
        self.engine_cpu += other.engine_cpu


@dataclass(frozen=True, slots=True)
class Figure:
    """The result for one number of streams. CPU in cores."""

    streams: int
    events_per_second: int
    gateway_cpu: float
    engine_cpu: float
    client_cpu: float
    events_per_gateway_core: int  # in a second
    events_per_bare_core: int
    ratio: float


def measure(streams: int, arguments: argparse.Namespace) -> Figure:
    """Count the events of this number of streams, in new processes for each round."""
    gateway, bare = Sample(), Sample()
    for _ in range(arguments.rounds):
        gateway.add(measure_gateway(streams, arguments))
        bare.add(measure_bare(streams, arguments))
    per_gateway_core, per_bare_core = gateway.events / gateway.server_cpu, bare.events / bare.server_cpu
    return Figure(
        streams=streams,
        events_per_second=round(gateway.events / gateway.seconds),
        gateway_cpu=round(gateway.server_cpu / gateway.seconds, 2),
        engine_cpu=round(gateway.engine_cpu / gateway.seconds, 2),
        client_cpu=round(gateway.client_cpu / gateway.seconds, 2),
        events_per_gateway_core=round(per_gateway_core),
        events_per_bare_core=round(per_bare_core),
        ratio=round(per_gateway_core / per_bare_core, 2),
    )


def measure_gateway(streams: int, arguments: argparse.Namespace) -> Sample:
    with (
        fake_engine_process("--repeat") as (engine, address),
        gateway_process(address, *arguments.gateway_argument) as (gateway, port),
    ):
        return count_events(port, streams, arguments, server=gateway.pid, engine=engine.pid)


def measure_bare(streams: int, arguments: argparse.Namespace) -> Sample:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.http.bare_server", "--port", str(port)]
    with process(command, is_ready=lambda: accepts(port)) as server:
        return count_events(port, streams, arguments, server=server.pid)


def count_events(
    port: int, streams: int, arguments: argparse.Namespace, *, server: int, engine: int | None = None
) -> Sample:
    """Run the client. `server` and `engine` are process ids."""
    command = [sys.executable, "-m", "benchmarks.http.event_counter", "--port", str(port), "--streams", str(streams)]
    command += ["--warm-up", str(arguments.warm_up), "--seconds", str(arguments.seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        processes = [psutil.Process(pid) for pid in (server, client.pid, engine) if pid is not None]
        if client.stdout.readline().strip() != "start":
            raise SystemExit("the client did not start, its output is above")
        before = [cpu_seconds(each) for each in processes]
        line = client.stdout.readline().split()
        after = [cpu_seconds(each) for each in processes]
    return Sample(int(line[1]), float(line[2]), *(b - a for a, b in zip(before, after, strict=True)))


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--seconds", type=float, default=3.0, help="time for which events are counted in a turn")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds before events are counted")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each server")
    parser.add_argument(
        "--gateway-argument", action="append", default=[], help="argument for proa-gateway serve, may be repeated"
    )
    arguments = parser.parse_args(argv)
    columns = ["streams", "events/s", "gateway CPU, cores", "engine CPU", "client CPU"]
    columns += ["events/s per gateway core", "events/s per core of bare uvicorn", "ratio"]
    print("|", " | ".join(columns), "|")
    print("|", " | ".join("---:" for _ in columns), "|")
    figures = []
    for streams in arguments.streams:
        figure = asdict(measure(streams, arguments))
        figures.append(figure)
        print("|", " | ".join(f"{value:,}" for value in figure.values()), "|", flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
