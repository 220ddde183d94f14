"""What this process may use of the machine it runs on: cores and memory, as its container limits them.

Reads /proc and the cgroup file systems (version 1 and 2); `root` is where they are mounted, for tests. Torch is not
imported here, so that thread counts can be set before it is.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # cgroup version 1 writes a huge number where there is no limit


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes. `limit` is the container's, None outside of one."""

    limit: int | None
    available: int  # on the machine, without swapping
    process: int  # held by this process and not given back under pressure


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
    """Cores that this process may keep busy: its affinity, or the container's quota where that is less."""
    cores = len(os.sched_getaffinity(0))
    for directory in _cgroup_directories(root, "cpu"):
        quota = _cpu_quota(directory)
        if quota is not None:
            cores = min(cores, max(1, math.floor(quota)))
    return cores


def threads_per_rank(num_ranks: int, cores: int) -> int:
    """More threads than cores make every rank wait for the others' at each barrier."""
    return max(1, cores // num_ranks)


def limit_threads(num_ranks: int) -> int:
    """Set the thread count for this process's tensor work, unless the environment has; returns it.

    Works only before torch is imported.
    """
    threads = threads_per_rank(num_ranks, available_cores())
    return int(os.environ.setdefault("OMP_NUM_THREADS", str(threads)))


def _memory_limit_files(root: Path) -> Iterator[Path]:
    for directory in _cgroup_directories(root, "memory"):
        yield directory / "memory.max"
        yield directory / "memory.limit_in_bytes"


def _cgroup_directories(root: Path, controller: str) -> Iterator[Path]:
    """This process's directories in the hierarchy that rules `controller`, with all of their parents.

    Inside a container the path may be the host's, of which only the mount's own root can be seen: parents cover that.
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
    """Cores' worth of time that the cgroup may use."""
    version_2 = directory / "cpu.max"
    if version_2.exists():
        quota, period = version_2.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    version_1 = directory / "cpu.cfs_quota_us"
    if version_1.exists() and (quota_us := int(version_1.read_text())) > 0:
        return quota_us / int((directory / "cpu.cfs_period_us").read_text())
    return None


def _fields(path: Path) -> dict[str, int]:
    """The "Name:  123 kB" lines of a /proc file, in bytes."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}
