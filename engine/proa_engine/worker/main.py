"""The worker program: one rank from 1 on, in a process of its own, spawned by the engine or in a sidecar container.

It listens on a Unix socket, serves the one engine that comes, and leaves when that engine does; whoever started it
starts it again. Torch is imported only after the thread count is set.
"""

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

from proa_engine.worker.host import limit_threads

# Set by an engine that spawns this program: its process id. Who runs as a sidecar has no such parent.
PARENT_VARIABLE = "PROA_ENGINE_PID"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_worker(rank: int, tensor_parallel_size: int, socket_path: str) -> int:
    """Serve one engine; returns the exit code: 0 where the engine said goodbye or none ever came."""
    if not 0 < rank < tensor_parallel_size:
        raise ValueError(f"rank must be from 1 to {tensor_parallel_size - 1}, got {rank}")
    if PARENT_VARIABLE in os.environ:
        _die_with(int(os.environ[PARENT_VARIABLE]))
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
    """The engine's connection; None where the process is told to stop before one comes."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        return listener.accept()[0]
    except KeyboardInterrupt:
        return None


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that spawned it ends: a stopped process sees no end of file."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(rank: int, text: str) -> None:
    print(f"worker rank {rank}: {text}", file=sys.stderr, flush=True)
