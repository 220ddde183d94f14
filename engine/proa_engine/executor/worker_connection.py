"""WorkerConnection: the engine's end of one worker's socket, and the worker's process where the engine spawned it."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread

from proa_engine.worker import wire
from proa_engine.worker.host import available_cores, threads_per_rank
from proa_engine.worker.main import PARENT_VARIABLE

_CONNECT_SECONDS = 600.0  # a sidecar may still be pulling its image
_RETRY_SECONDS = 0.1
_REPORT_SECONDS = 5.0
_EXIT_SECONDS = 5.0


def spawn(rank: int, num_ranks: int, socket_path: Path) -> subprocess.Popen[bytes]:
    """Start the worker program. It is killed when the calling thread ends, and takes no signals of this terminal."""
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
    """`on_lost` is called once, from the link's thread, when the worker says that it failed or its socket ends."""

    def __init__(
        self, rank: int, path: Path, process: subprocess.Popen[bytes] | None, on_lost: Callable[[str], None]
    ) -> None:
        self.rank = rank
        self.ready: Future[wire.Ready] = Future()
        self.started: Future[wire.Started] = Future()
        self._path = path
        self._process = process
        self._on_lost = on_lost
        self._socket: socket.socket | None = None
        self._is_closing = False

    def connect(self, report: Callable[[str], None]) -> None:
        """Wait for the worker to listen. Raises ConnectionError where its process ends or the time runs out."""
        began = reported = time.monotonic()
        while (connection := try_connect(self._path)) is None:
            now = time.monotonic()
            if self._process is not None and self._process.poll() is not None:
                raise ConnectionError(f"{self._name()} {self._ending()} before it listened")
            if now - began > _CONNECT_SECONDS:
                raise ConnectionError(f"{self._name()} did not listen within {_CONNECT_SECONDS:.0f} s")
            if now - reported > _REPORT_SECONDS:
                report(f"waiting for {self._name()}")
                reported = now
            time.sleep(_RETRY_SECONDS)
        self._socket = connection
        Thread(target=self._read, args=(connection,), name=f"proa-link-{self.rank}", daemon=True).start()

    def send(self, frame: bytes) -> None:
        """Write a frame; a worker that is gone is `on_lost`'s to tell, not this call's."""
        assert self._socket is not None
        with suppress(OSError):
            self._socket.sendall(frame)

    def kill(self) -> None:
        """End the process at once where it is ours. From any thread."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Say goodbye, and end the process where it is ours."""
        self._is_closing = True
        if self._socket is not None:
            self.send(wire.encode(wire.Shutdown()))
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
                self._socket.shutdown(socket.SHUT_RDWR)  # ends the reader
            self._socket.close()
            self._socket = None

    def _read(self, connection: socket.socket) -> None:
        reader = wire.engine_reader(connection)
        told: str | None = None
        with suppress(OSError):
            while (message := reader.read()) is not None:
                match message:
                    case wire.Ready():
                        self.ready.set_result(message)
                    case wire.Started():
                        self.started.set_result(message)
                    case wire.Failed():
                        told = f"failed: {message.reason}"
        if not self._is_closing:
            self._on_lost(f"{self._name()} {told or self._ending()}")

    def _name(self) -> str:
        where = f"process {self._process.pid}" if self._process is not None else str(self._path)
        return f"tensor-parallel rank {self.rank} ({where})"

    def _ending(self) -> str:
        """How the process ended, where that can be known."""
        if self._process is None:
            return "closed its connection"
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(0.5)
            return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return "closed its connection"


def try_connect(path: Path) -> socket.socket | None:
    """A connection to the worker; None where it does not listen yet."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    return connection
