"""SSE events per second of one gateway process, with one token an event.

A fake engine process sends one message a step, as fast as the gateway reads; a client process on raw sockets counts
events without parsing them. All three share the machine's cores: compare events per second of the gateway's CPU time.

    PYTHONPATH=tests python tests/benchmarks/sse.py --streams 1 64 256
"""

import argparse
import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import psutil

from support.processes import TESTS, fake_engine_process, gateway_process

_EVENT = b"data: "
_PAUSE_SECONDS = 0.001  # so that the client reads many events at once and uses little CPU


@dataclass(frozen=True, slots=True)
class Figure:
    """The result for one number of streams. CPU in cores."""

    streams: int
    events_per_second: float
    gateway_cpu: float
    events_per_gateway_cpu_second: float
    engine_cpu: float
    client_cpu: float


class EventCounter:
    """Open streams, and the number of their events."""

    def __init__(self, port: int, streams: int) -> None:
        self.count = 0
        self._selector = selectors.DefaultSelector()
        self._tails: dict[int, bytes] = {}  # file descriptor -> last bytes, which may begin an event
        for _ in range(streams):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(_request())
            self._selector.register(connection, selectors.EVENT_READ)
            self._tails[connection.fileno()] = b""

    def all_started(self) -> bool:
        return all(self._tails.values())

    def poll(self) -> None:
        for key, _ in self._selector.select(0.1):
            assert isinstance(key.fileobj, socket.socket)
            received = key.fileobj.recv(1 << 20)
            if not received:
                raise SystemExit("the gateway ended a stream")
            seen = self._tails[key.fd] + received
            self.count += seen.count(_EVENT)
            self._tails[key.fd] = seen[-len(_EVENT) + 1 :]
        time.sleep(_PAUSE_SECONDS)


def count_events(port: int, streams: int, warm_up: float, seconds: float) -> None:
    """Run the client: prints `start` when it begins to count, then `end EVENTS SECONDS`."""
    counter = EventCounter(port, streams)
    while not counter.all_started():
        counter.poll()
    start = time.monotonic() + warm_up
    while time.monotonic() < start:
        counter.poll()
    counter.count, start = 0, time.monotonic()
    print("start", flush=True)
    while time.monotonic() < start + seconds:
        counter.poll()
    print(f"end {counter.count} {time.monotonic() - start}", flush=True)


def _request() -> bytes:
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": "Go on."}],
        "stream": True,
        "max_tokens": 900_000,
        "temperature": 0,
    }
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def measure(streams: int, arguments: argparse.Namespace) -> Figure:
    """Start a new engine and a new gateway, and count the events of this number of streams."""
    with (
        fake_engine_process("--repeat") as (engine, address),
        gateway_process(address, *arguments.gateway_argument) as (gateway, port),
    ):
        command = [sys.executable, __file__, "--client", str(port), "--streams", str(streams)]
        command += ["--warm-up", str(arguments.warm_up), "--seconds", str(arguments.seconds)]
        environment = {**os.environ, "PYTHONPATH": str(TESTS)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as client:
            assert client.stdout is not None
            processes = [psutil.Process(child.pid) for child in (gateway, engine, client)]
            if client.stdout.readline().strip() != "start":
                raise SystemExit("the client did not start, its output is above")
            before = [cpu_seconds(each) for each in processes]
            line = client.stdout.readline().split()
            after = [cpu_seconds(each) for each in processes]
    count, seconds = int(line[1]), float(line[2])
    gateway_cpu, engine_cpu, client_cpu = (b - a for a, b in zip(before, after, strict=True))
    return Figure(
        streams=streams,
        events_per_second=round(count / seconds),
        gateway_cpu=round(gateway_cpu / seconds, 2),
        events_per_gateway_cpu_second=round(count / gateway_cpu),
        engine_cpu=round(engine_cpu / seconds, 2),
        client_cpu=round(client_cpu / seconds, 2),
    )


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--seconds", type=float, default=5.0, help="time for which events are counted")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds before events are counted")
    parser.add_argument(
        "--gateway-argument", action="append", default=[], help="argument for proa-gateway serve, may be repeated"
    )
    parser.add_argument("--client", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.client:
        count_events(arguments.client, arguments.streams[0], arguments.warm_up, arguments.seconds)
        return
    print("| streams | events/s | gateway CPU, cores | events/s per gateway core | engine CPU | client CPU |")
    print("|---:|---:|---:|---:|---:|---:|")
    figures = []
    for streams in arguments.streams:
        figure = measure(streams, arguments)
        figures.append(figure)
        row = [figure.streams, f"{figure.events_per_second:,}", figure.gateway_cpu]
        row += [f"{figure.events_per_gateway_cpu_second:,}", figure.engine_cpu, figure.client_cpu]
        print("|", " | ".join(map(str, row)), "|", flush=True)
    print(json.dumps([asdict(figure) for figure in figures]))


if __name__ == "__main__":
    main()
