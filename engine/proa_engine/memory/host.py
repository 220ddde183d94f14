"""Cores and memory that this process may use, within its container's limits.

Reads /proc and the cgroup file systems (versions 1 and 2) under `root`, which tests replace. Does not import torch,
because its thread count must be set before the import.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SPINS = 1000  # about 10 us
_UNLIMITED = 1 << 60  # cgroup version 1 writes a huge number where there is no limit


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory that this process may use, in bytes."""

    limit: int | None  # of the container; None outside of one
    available: int  # on the machine, without swapping
    process: int  # of this process and not reclaimable


def read_memory(root: Path = Path("/")) -> HostMemory:
    machine = _fields(root / "proc/meminfo")
    process = _fields(root / "proc/self/status")
    limits = [limit for path in _memory_limit_files(root) if (limit := _read_limit(path)) is not None]
    return HostMemory(
        limit=min(limits, default=None),
        available=machine["MemAvailable"],
        process=process["RssAnon"] + process["RssShmem"],
    )


def available_cores(root: Path = Path("/")) -> int:
    """Return the cores that this process may use: its CPU affinity, or the container's CPU quota if that is less."""
    cores = len(os.sched_getaffinity(0))
    for directory in _cgroup_directories(root, "cpu"):
        quota = _cpu_quota(directory)
        if quota is not None:
            cores = min(cores, max(1, math.floor(quota)))
    return cores


def threads_per_rank(num_ranks: int, cores: int) -> int:
    """Return this rank's share of the cores. With more threads than cores, ranks wait for each other at every
    barrier."""
    return max(1, cores // num_ranks)


def set_thread_variables(num_ranks: int) -> None:
    """Set OMP_NUM_THREADS and GOMP_SPINCOUNT unless they are set. Has no effect once torch is imported.

    By default a thread spins for 3 ms at the end of a parallel loop, while the thread that it waits for may be waiting
    for its core. Measured with the built-in model, 64 clients and a gateway on two cores: with `SPINS`, throughput is
    17 % lower if nothing else runs; but beside a busy process requests time out with the default.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(num_ranks, available_cores())))
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


def _memory_limit_files(root: Path) -> Iterator[Path]:
    for directory in _cgroup_directories(root, "memory"):
        yield directory / "memory.max"
        yield directory / "memory.limit_in_bytes"


def _cgroup_directories(root: Path, controller: str) -> Iterator[Path]:
    """Yield this process's directories in the hierarchy of `controller`, with all of their parents.

    Inside a container the path may be the host's while only the mount's root is visible: the parents cover that.
    """
    path = root / "proc/self/cgroup"
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        _, controllers, cgroup = line.split(":", 2)
        if not controllers:  # version 2: one hierarchy for all
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        directory = mount / cgroup.lstrip("/")
        while directory != mount:
            yield directory
            directory = directory.parent
        yield mount


def _read_limit(path: Path) -> int | None:
    if not path.exists():
        return None
    text = path.read_text().strip()
    if text == "max" or int(text) >= _UNLIMITED:
        return None
    return int(text)


def _cpu_quota(directory: Path) -> float | None:
    """Return the CPU quota of the cgroup in cores; None if it has no quota."""
    version_2 = directory / "cpu.max"
    if version_2.exists():
        quota, period = version_2.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    version_1 = directory / "cpu.cfs_quota_us"
    if version_1.exists() and (quota_us := int(version_1.read_text())) > 0:
        return quota_us / int((directory / "cpu.cfs_period_us").read_text())
    return None


def _fields(path: Path) -> dict[str, int]:
    """Parse the "Name:  123 kB" lines of a /proc file: name -> bytes."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}
