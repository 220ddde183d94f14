"""The worker program: one rank other than 0 in its own process, spawned by the engine or run as a sidecar container.

It listens on a Unix socket, serves one engine and exits when that engine does; a sidecar is then restarted by its
container runtime. Torch is imported only after the thread count is set.
"""

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

from proa_engine.worker.host import set_thread_variables

# Process id of the engine that spawned this program; not set in a sidecar.
PARENT_VARIABLE = "PROA_ENGINE_PID"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_worker(rank: int, tensor_parallel_size: int, socket_path: str) -> int:
    """Serve one engine. Returns the exit code: 0 if the engine shut down normally or none ever connected."""
    if not 0 < rank < tensor_parallel_size:
        raise ValueError(f"rank must be from 1 to {tensor_parallel_size - 1}, got {rank}")
    if PARENT_VARIABLE in os.environ:
        _exit_with_parent(int(os.environ[PARENT_VARIABLE]))
    set_thread_variables(tensor_parallel_size)
    with _listen(socket_path) as listener:
        _log(rank, f"listening on {socket_path}")
        from proa_engine.worker.rank_server import RankServer  # imports torch, which is slow, while the engine connects

        connection = _accept(listener)
    Path(socket_path).unlink(missing_ok=True)
    if connection is None:
        return 0
    # Kubernetes signals all containers of a pod at once, a terminal all processes of a group. The engine drains its
    # requests first and needs this rank until it exits, which then ends this process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return RankServer(connection, rank, lambda line: _log(rank, line)).serve()


def _listen(socket_path: str) -> socket.socket:
    path = Path(socket_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # left by an earlier process
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(socket_path)
    listener.listen(1)
    return listener


def _accept(listener: socket.socket) -> socket.socket | None:
    """Return the engine's connection; None if SIGTERM or SIGINT arrives first."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        return listener.accept()[0]
    except KeyboardInterrupt:
        return None


def _exit_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that spawned it ends, even while it is stopped by SIGSTOP."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _log(rank: int, line: str) -> None:
    print(f"worker rank {rank}: {line}", file=sys.stderr, flush=True)
