"""The worker program: one rank from 1 on, in a process of its own, spawned by the engine or in a sidecar container.

It listens on a Unix socket, serves the one engine that comes, and leaves when that engine does; whoever started it
starts it again. Torch is imported only after the thread count is set.
"""

import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

from proa_engine.worker.host import limit_threads

_PARENT_CHECK_SECONDS = 1.0


def run_worker(rank: int, tensor_parallel_size: int, socket_path: str) -> int:
    """Serve one engine; returns the exit code: 0 where the engine said goodbye or none ever came."""
    if not 0 < rank < tensor_parallel_size:
        raise ValueError(f"rank must be from 1 to {tensor_parallel_size - 1}, got {rank}")
    limit_threads(tensor_parallel_size)
    with _listen(socket_path) as listener:
        _say(rank, f"listening on {socket_path}")
        from proa_engine.worker.rank_server import RankServer  # imports torch, while an engine may already connect

        connection = _accept(listener)
    Path(socket_path).unlink(missing_ok=True)
    if connection is None:
        return 0
    # A pod's containers are told to stop all at once, and so is a terminal's process group; the engine drains first,
    # and its leaving is what ends this process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return RankServer(connection, rank, lambda text: _say(rank, text)).serve()


def _listen(socket_path: str) -> socket.socket:
    path = Path(socket_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # an earlier life's
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(socket_path)
    listener.listen(1)
    return listener


def _accept(listener: socket.socket) -> socket.socket | None:
    """The engine's connection; None where the process is told to stop, or its parent is gone, before one comes."""
    signal.signal(signal.SIGTERM, _stop)
    parent = os.getppid()
    listener.settimeout(_PARENT_CHECK_SECONDS)
    try:
        while os.getppid() == parent:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            connection.setblocking(True)
            return connection
    except KeyboardInterrupt:
        pass
    return None


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(rank: int, text: str) -> None:
    print(f"worker rank {rank}: {text}", file=sys.stderr, flush=True)
