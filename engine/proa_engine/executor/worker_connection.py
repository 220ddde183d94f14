"""WorkerConnection: the engine's side of a worker's socket, and the worker's process if the engine spawned it."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread

from proa_engine.core.lora_store import LoraInvalid, LoraNotFound
from proa_engine.framing import encode
from proa_engine.mover.messages import ToCore
from proa_engine.worker import wire
from proa_engine.worker.host import available_cores, threads_per_rank
from proa_engine.worker.main import PARENT_VARIABLE

_CONNECT_SECONDS = 600.0  # a sidecar may still be pulling its image
_RETRY_SECONDS = 0.1
_LOG_SECONDS = 5.0
_EXIT_SECONDS = 5.0


def spawn(rank: int, num_ranks: int, socket_path: Path) -> subprocess.Popen[bytes]:
    """Start the worker program. It is killed when the calling thread ends and ignores this terminal's signals."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(threads_per_rank(num_ranks, available_cores()))
    command = [sys.executable, "-m", "proa_engine", "worker", "--rank", str(rank)]
    command += ["--tensor-parallel-size", str(num_ranks), "--socket", str(socket_path)]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": threads, PARENT_VARIABLE: str(os.getpid())},
    )


class WorkerConnection:
    """The connection to another rank's worker.

    Calls `on_lost` once with the reason, from the reader thread, when the worker fails or closes its socket, and
    `on_mover` with the messages of its mover.
    """

    def __init__(
        self,
        rank: int,
        path: Path,
        process: subprocess.Popen[bytes] | None,
        on_lost: Callable[[str], None],
        on_mover: Callable[[ToCore], None],
    ) -> None:
        self.rank = rank
        self.ready: Future[wire.Ready] = Future()
        self.started: Future[wire.Started] = Future()
        self._done: Future[None] = Future()  # result of the last `call`
        self._loras: dict[int, Future[str]] = {}  # by id: adapters that the worker is reading
        self._sending = Lock()
        self._path = path
        self._process = process
        self._on_lost = on_lost
        self._on_mover = on_mover
        self._socket: socket.socket | None = None
        self._is_closing = False

    def connect(self, log: Callable[[str], None]) -> None:
        """Connect once the worker listens. Raises ConnectionError if its process ends or after 600 s."""
        started = logged = time.monotonic()
        while (connection := try_connect(self._path)) is None:
            now = time.monotonic()
            if self._process is not None and self._process.poll() is not None:
                raise ConnectionError(f"{self._name()} {self._ending()} before it listened")
            if now - started > _CONNECT_SECONDS:
                raise ConnectionError(f"{self._name()} did not listen within {_CONNECT_SECONDS:.0f} s")
            if now - logged > _LOG_SECONDS:
                log(f"waiting for {self._name()}")
                logged = now
            time.sleep(_RETRY_SECONDS)
        self._socket = connection
        Thread(target=self._read, args=(connection,), name=f"proa-worker-{self.rank}", daemon=True).start()

    def send(self, frame: bytes) -> None:
        """Write a frame, from any thread. Errors are ignored: the reader thread reports a lost worker to `on_lost`."""
        assert self._socket is not None
        with suppress(OSError), self._sending:
            self._socket.sendall(frame)

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

    def kill(self) -> None:
        """Kill the process if the engine spawned it. Thread-safe."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Send Shutdown, and wait for the process to exit if the engine spawned it; kill it after 5 s."""
        self._is_closing = True
        if self._socket is not None:
            self.send(encode(wire.Shutdown()))
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        if self._process is not None:
            try:
                self._process.wait(_EXIT_SECONDS if self._socket is not None else 0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # ends the reader thread
            self._socket.close()
            self._socket = None

    def _read(self, connection: socket.socket) -> None:
        reader = wire.engine_reader(connection)
        failure: str | None = None
        with suppress(OSError):
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
                        self._loras.pop(message.lora_id).set_exception(kind(f"{self._name()}: {message.error}"))
                    case wire.LoraRead():
                        self._loras.pop(message.lora_id).set_result(message.digest)
                    case wire.FromMover():
                        self._on_mover(message.message)
                    case wire.Failed():
                        failure = f"failed: {message.reason}"
        if not self._is_closing:
            self._on_lost(f"{self._name()} {failure or self._ending()}")

    def _name(self) -> str:
        where = f"process {self._process.pid}" if self._process is not None else str(self._path)
        return f"tensor-parallel rank {self.rank} ({where})"

    def _ending(self) -> str:
        """Describe how the process ended, as far as known."""
        if self._process is None:
            return "closed its connection"
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(0.5)
            return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return "closed its connection"


def try_connect(path: Path) -> socket.socket | None:
    """Return a connection to the worker; None if it does not listen yet."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    return connection
