"""Start worker programs, and end them with the process that started them."""

import ctypes
import os
import signal
import subprocess
import sys

from proa_engine.memory.host import available_cores, threads_per_rank

# Process id of the process that started this program; not set in a sidecar.
PARENT_VARIABLE = "PROA_ENGINE_PID"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def spawn(*arguments: str, ranks_here: int) -> subprocess.Popen[bytes]:
    """Run `proa-engine` with these arguments, as one of the ranks of this machine. It is killed when the calling thread
    ends and ignores this terminal's signals."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(threads_per_rank(ranks_here, available_cores()))
    return subprocess.Popen(
        [sys.executable, "-m", "proa_engine", *arguments],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": threads, PARENT_VARIABLE: str(os.getpid())},
    )


def exit_with_parent() -> None:
    """End this program with the thread that started it (`exit_with`). Does nothing if `PARENT_VARIABLE` is not set."""
    if (parent := os.environ.get(PARENT_VARIABLE)) is not None:
        exit_with(int(parent))


def exit_with(parent: int) -> None:
    """Have the kernel kill this process when the thread of process `parent` that started it ends, even while it is
    stopped by SIGSTOP. Processes that this one forks do not inherit that."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)
