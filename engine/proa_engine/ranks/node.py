"""A node other than 0: the process that runs its ranks, as worker processes which connect to node 0."""

import logging
import signal
import subprocess
import time
from types import FrameType

import msgspec

from proa_engine.config import EngineConfig
from proa_engine.ranks.connect import NodeRank
from proa_engine.ranks.handshake import make_hello
from proa_engine.ranks.spawn import spawn

COMMAND = "node-worker"  # with a `NodeRank` as JSON
_EXIT_SECONDS = 10.0  # from the end of one rank until those that have not ended are killed
_POLL_SECONDS = 0.1
_log = logging.getLogger(__name__)


def run_node(config: EngineConfig) -> int:
    """Run the ranks of node `node_rank` until the engine ends. Returns the exit code: 0 if it shut down
    normally, or SIGTERM arrived before it listened."""
    node_rank, ranks_per_node = config.parallel.node_rank, config.parallel.ranks_per_node
    ranks = range(node_rank * ranks_per_node, (node_rank + 1) * ranks_per_node)
    _log.info("node %d: starting ranks %d to %d", node_rank, ranks[0], ranks[-1])
    processes = [_start(config, rank) for rank in ranks]

    is_stopping = False

    def on_signal(number: int, _frame: FrameType | None) -> None:
        """Let each worker decide: it exits, or once it is connected serves until the engine has drained. The second
        signal ends this process, and the kernel then ends its workers."""
        nonlocal is_stopping
        if is_stopping:
            raise SystemExit(128 + number)
        is_stopping = True
        name = signal.Signals(number).name
        _log.info("%s: ranks that are connected to node 0 run until it ends; %s again ends them now", name, name)
        for process in processes:
            process.send_signal(number)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    codes = _wait(processes)
    _log.info("node %d: its ranks ended with %s", node_rank, ", ".join(map(str, codes)))
    return 1 if any(codes) else 0


def _start(config: EngineConfig, rank: int) -> subprocess.Popen[bytes]:
    parallel = config.parallel
    assert parallel.master_addr is not None, "checked by Parallel"
    setup = NodeRank(make_hello(config, rank), parallel.master_addr, parallel.master_port, config.peer_tls)
    return spawn(COMMAND, msgspec.json.encode(setup).decode(), ranks_here=parallel.ranks_here)


def _wait(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """Wait until all have ended, and kill those that still run a while after the first."""
    while all(process.poll() is None for process in processes):
        time.sleep(_POLL_SECONDS)
    deadline = time.monotonic() + _EXIT_SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    for process in processes:
        process.kill()
    return [process.wait() for process in processes]
