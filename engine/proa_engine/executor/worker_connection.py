"""WorkerConnection: the engine's connection to a worker. Endpoint: where it comes from, and the worker's process."""

import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread
from typing import Protocol

import msgspec

from proa_engine.core.lora_store import LoraInvalid, LoraNotFound
from proa_engine.executor.remote_ranks import RemoteRanks
from proa_engine.framing import Stream, encode
from proa_engine.mover.messages import ToCore
from proa_engine.ranks import wire

_CONNECT_SECONDS = 600.0  # a sidecar or another node may still be pulling its image
_RETRY_SECONDS = 0.1
_LOG_SECONDS = 5.0
_EXIT_SECONDS = 5.0


class Endpoint(Protocol):
    """Where the engine gets its connection to a worker, and the worker's process as far as the engine can reach it."""

    def open(self) -> Stream | None:
        """Return the connection; None if there is none yet."""
        ...

    def has_ended(self) -> bool:
        """Whether the process is known to have ended."""
        ...

    def ending(self) -> str:
        """Describe how the process ended, as far as known."""
        ...

    def kill(self) -> None:
        """Kill the process if the engine spawned it. Thread-safe."""
        ...

    def join(self, seconds: float) -> None:
        """Wait until the process has ended if the engine spawned it, and kill it after so long."""
        ...

    def __str__(self) -> str:
        """Return the endpoint's name in messages."""
        ...


class ForeignEndpoint:
    """A worker whose process the engine did not spawn: a sidecar's or another node's."""

    __slots__ = ()

    def has_ended(self) -> bool:
        return False

    def ending(self) -> str:
        return "closed its connection"

    def kill(self) -> None:
        pass

    def join(self, seconds: float) -> None:
        pass


@dataclass(frozen=True, slots=True)
class SpawnedEndpoint:
    """A process that the engine spawned, and the socket on which it listens."""

    path: Path
    process: subprocess.Popen[bytes]

    def open(self) -> socket.socket | None:
        return try_connect(self.path)

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def ending(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(0.5)
            return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return "closed its connection"

    def kill(self) -> None:
        self.process.kill()

    def join(self, seconds: float) -> None:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __str__(self) -> str:
        return f"process {self.process.pid}"


@dataclass(frozen=True, slots=True)
class UnixEndpoint(ForeignEndpoint):
    """The socket on which a sidecar listens."""

    path: Path

    def open(self) -> socket.socket | None:
        return try_connect(self.path)

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class NodeEndpoint(ForeignEndpoint):
    """The connection that a rank of another node opens."""

    ranks: RemoteRanks
    rank: int

    def open(self) -> Stream | None:
        return self.ranks.take(self.rank)

    def __str__(self) -> str:
        return self.ranks.describe(self.rank)


def wait_for_worker(rank: int, endpoint: Endpoint, log: Callable[[str], None], check: Callable[[], None]) -> Stream:
    """Connect to a rank's worker as soon as it can be reached. `check` is called while waiting and raises if the engine
    has failed. Raises ConnectionError if the worker's process ends or after 600 s."""
    started = logged = time.monotonic()
    while (stream := endpoint.open()) is None:
        check()
        now = time.monotonic()
        if endpoint.has_ended():
            raise ConnectionError(f"{_name(rank, endpoint)} {endpoint.ending()} before it connected")
        if now - started > _CONNECT_SECONDS:
            raise ConnectionError(f"{_name(rank, endpoint)} did not connect within {_CONNECT_SECONDS:.0f} s")
        if now - logged > _LOG_SECONDS:
            log(f"waiting for {_name(rank, endpoint)}")
            logged = now
        time.sleep(_RETRY_SECONDS)
    return stream


class WorkerConnection:
    """The connection to another rank's worker, over a stream that it owns.

    Calls `on_lost` once with the reason, from the reader thread, when the worker fails or its connection ends, and
    `on_mover` with the messages of its mover.
    """

    def __init__(
        self,
        rank: int,
        endpoint: Endpoint,
        stream: Stream,
        on_lost: Callable[[str], None],
        on_mover: Callable[[ToCore], None],
    ) -> None:
        self._rank = rank
        self.ready: Future[wire.Ready] = Future()
        self.started: Future[wire.Started] = Future()
        self._done: Future[None] = Future()  # result of the last `call`
        self._loras: dict[int, Future[str]] = {}  # by id: adapters that the worker is reading
        self._sending = Lock()
        self._endpoint = endpoint
        self._stream = stream
        self._on_lost = on_lost
        self._on_mover = on_mover
        self._is_closing = False
        self._reader = Thread(target=self._read, name=f"proa-worker-{rank}", daemon=True)
        self._reader.start()

    def send(self, frame: bytes) -> None:
        """Write a frame, from any thread. Errors are ignored: the reader thread reports a lost worker to `on_lost`."""
        with suppress(OSError), self._sending:
            self._stream.sendall(frame)

    def call(self, message: wire.Sleep | wire.WakeUp) -> "Future[None]":
        """Have the worker handle `message` after its steps. Only one call at a time. The future never fails: see
        `on_lost`."""
        self._done = Future()
        self.send(encode(message))
        return self._done

    def load_lora(self, lora_id: int, path: str) -> "Future[str]":
        """Have the worker read an adapter. The future's result is the digest; it fails with a `LoraError`."""
        future = self._loras[lora_id] = Future()
        self.send(encode(wire.LoadLora(lora_id, path)))
        return future

    def request_exit(self, *, has_failed: bool) -> None:
        """Have the worker exit: with an error if the engine has failed. The end of the connection is then no loss."""
        self._is_closing = True
        if not has_failed:
            self.send(encode(wire.Shutdown()))
        with suppress(OSError):
            self._stream.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Wait until the worker has exited after `request_exit`, at most 5 s. A process that the engine spawned is then
        killed."""
        self._endpoint.join(_EXIT_SECONDS)
        self._reader.join(_EXIT_SECONDS)  # the worker's process ends the connection
        with suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)  # ends the reader thread
        self._stream.close()

    def _read(self) -> None:
        reader = wire.engine_reader(self._stream)
        name = _name(self._rank, self._endpoint)
        failure: str | None = None
        try:
            while (message := reader.read()) is not None:
                match message:
                    case wire.Ready():
                        self.ready.set_result(message)
                    case wire.Started():
                        self.started.set_result(message)
                    case wire.Done():
                        self._done.set_result(None)
                    case wire.LoraRead() if message.error:
                        kind = LoraNotFound if message.is_missing else LoraInvalid
                        self._loras.pop(message.lora_id).set_exception(kind(f"{name}: {message.error}"))
                    case wire.LoraRead():
                        self._loras.pop(message.lora_id).set_result(message.digest)
                    case wire.FromMover():
                        self._on_mover(message.message)
                    case wire.Failed():
                        failure = f"failed: {message.reason}"
        except OSError as error:  # for example of a machine that does not answer
            failure = failure or f"is lost: {error.strerror or error}"
        except msgspec.MsgspecError as error:
            failure = f"sent what is no message: {error}"
        if not self._is_closing:
            self._on_lost(f"{name} {failure or self._endpoint.ending()}")


def _name(rank: int, endpoint: Endpoint) -> str:
    """Return a worker's name in messages."""
    return f"rank {rank} ({endpoint})"


def try_connect(path: Path) -> socket.socket | None:
    """Return a connection to the worker; None if it does not listen yet."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    return connection
