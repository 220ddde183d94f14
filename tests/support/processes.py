"""Context managers that start programs as processes, wait until they are ready and end them."""

import http.client
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

TESTS = Path(__file__).parents[1]


def _own_ports() -> Iterator[int]:
    """Ports of this worker of pytest-xdist, again and again, from a random one on.

    They are below those that Linux gives to sockets which ask for any port, and those of Kubernetes' Services: a port
    of the kernel's may belong to another socket when the program that shall listen there has started, after seconds.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 10
    first = 20_000 + 1_000 * worker
    start = random.SystemRandom().randrange(1_000)
    return itertools.cycle([*range(first + start, first + 1_000), *range(first, first + start)])


_PORTS = _own_ports()


def free_port() -> int:
    """A port on which no process listens, another one in each call."""
    while True:
        port = next(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def http_status(port: int, path: str, host: str = "127.0.0.1") -> int | None:
    """The status of a GET; None if the connection fails."""
    connection = http.client.HTTPConnection(host, port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


@contextmanager
def process(
    command: Sequence[str],
    *,
    is_ready: Callable[[], bool],
    seconds: float = 90.0,
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A running program that is ready. It is ended with SIGTERM, and after 10 s with SIGKILL.

    Raises AssertionError with the program's output if it ends first or is not ready in time.
    """
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})})
        try:
            deadline = time.monotonic() + seconds
            while not is_ready():
                if child.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    printed = log.read().decode(errors="replace")
                    raise AssertionError(f"{' '.join(command)} is not ready (status {child.poll()}):\n{printed}")
                time.sleep(0.05)
            yield child
        finally:
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


@contextmanager
def fake_engine_process(*arguments: str, port: int | None = None) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A fake engine process and its address. For arguments see `python -m support.fake_engine_main --help`."""
    port = port or free_port()
    command = [sys.executable, "-m", "support.fake_engine_main", "--port", str(port), *arguments]
    with process(command, is_ready=lambda: accepts(port), env={"PYTHONPATH": str(TESTS)}) as child:
        yield child, f"127.0.0.1:{port}"


@contextmanager
def gateway_process(
    engine: str, *arguments: str, port: int | None = None, env: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A ready gateway process and its port."""
    port = port or free_port()
    command = [sys.executable, "-m", "proa_gateway", "serve", "--engine", engine, "--host", "127.0.0.1"]
    command += ["--port", str(port), *arguments]
    with process(command, is_ready=lambda: http_status(port, "/ready") == 200, env=env) as child:
        yield child, port


@contextmanager
def engine_process(
    *arguments: str, port: int | None = None, env: Mapping[str, str] | None = None, seconds: float = 180.0
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """An engine process that has loaded its model, and its address."""
    port = port or free_port()
    command = [sys.executable, "-m", "proa_engine", "serve", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--metrics-port", "0", *arguments]
    with process(command, is_ready=lambda: is_loaded(port), env=env, seconds=seconds) as child:
        yield child, f"127.0.0.1:{port}"


def wait_for_models(port: int, names: Collection[str], seconds: float = 30.0) -> None:
    """Wait until a gateway has found engines of all these models. Raises AssertionError if it does not in time."""
    deadline = time.monotonic() + seconds
    while not served_models(port).issuperset(names):
        assert time.monotonic() < deadline, f"the gateway has not found engines of {', '.join(names)}"
        time.sleep(0.05)


def wait_for_engines(port: int, count: int, seconds: float = 30.0) -> None:
    """Wait until a gateway is connected to so many engines: with one it is ready."""
    deadline = time.monotonic() + seconds
    while num_sessions(port) < count:
        assert time.monotonic() < deadline, f"the gateway is not connected to {count} engines"
        time.sleep(0.05)


def num_sessions(port: int) -> float:
    """The engines to which a gateway is connected."""
    from support.scrape import Scrape

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/metrics")
        return Scrape(connection.getresponse().read().decode()).value("proa_gateway_sessions")
    finally:
        connection.close()


def served_models(port: int) -> set[str]:
    """The models of a gateway."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/v1/models")
        return {model["id"] for model in json.load(connection.getresponse())["data"]}
    finally:
        connection.close()


def accepts(port: int) -> bool:
    """Whether a process listens on the port."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def is_loaded(port: int) -> bool:
    """Whether the engine's health service `startup` is SERVING."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service="startup"), timeout=2)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def kill_with_children(pid: int) -> None:
    """Kill a process and all that it has started, as if its machine were lost. Some may end by themselves meanwhile."""
    import psutil

    process = psutil.Process(pid)
    for each in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            each.kill()


def worker_pids() -> list[int]:
    """Process ids of the running workers that this process spawned."""
    children = [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    return [int(pid) for pid in children if b"\0worker\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
