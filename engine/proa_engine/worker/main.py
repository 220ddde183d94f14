"""The worker program: one rank other than 0 in its own process. It serves one engine and exits when that engine does.

A worker on the engine's machine, spawned by the engine or run as a sidecar container, listens on a Unix socket. One on
another node is spawned by that node's process (`node.py`) and connects to the engine. Torch is imported only after the
thread count is set.
"""

import logging
import signal
import socket
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from proa.imports import importing
from proa_engine.framing import Stream
from proa_engine.memory.host import set_thread_variables
from proa_engine.ranks.connect import NodeRank, connect
from proa_engine.ranks.spawn import exit_with_parent

if TYPE_CHECKING:
    from proa_engine.worker.rank_server import RankServer

_log = logging.getLogger(__name__)


def run_worker(rank: int, num_ranks: int, socket_path: str) -> int:
    """Serve the engine that connects. Returns the exit code: 0 if the engine shut down normally or none ever connected.

    Raises `OSError` if the socket cannot be bound.
    """
    if not 0 < rank < num_ranks:
        raise ValueError(f"rank must be from 1 to {num_ranks - 1}, got {rank}")
    exit_with_parent()
    set_thread_variables(num_ranks)
    with _listen(socket_path) as listener:
        _log.info("listening on %s", socket_path)
        _rank_server()  # torch loads while the engine connects
        connection = _accept(listener)
    Path(socket_path).unlink(missing_ok=True)
    return 0 if connection is None else _serve(connection, rank)


def run_node_worker(rank: NodeRank) -> int:
    """Connect to node 0 once it listens, and serve it. Returns the exit code: 0 if the engine shut down normally, or
    SIGTERM arrived before it listened.

    Raises `RankRefused` if node 0 does not accept the rank, and `ValueError` if a TLS file is invalid.
    """
    exit_with_parent()
    set_thread_variables(rank.hello.num_ranks // rank.hello.nnodes)
    signal.signal(signal.SIGTERM, _stop)
    try:
        connection = connect(rank, _log.info)
    except KeyboardInterrupt:
        return 0
    _log.info("connected to %s", rank.node_0)
    return _serve(connection, rank.hello.rank)


def _serve(connection: Stream, rank: int) -> int:
    # Kubernetes signals all containers of a pod at once, a terminal all processes of a group. The engine drains its
    # requests first and needs this rank until it exits, which then ends this process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return _rank_server()(connection, rank).serve()


def _rank_server() -> "type[RankServer]":
    with importing():
        from proa_engine.worker.rank_server import RankServer
    return RankServer


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


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
