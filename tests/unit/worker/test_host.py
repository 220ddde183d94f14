"""Memory and cores that a process may use, read from fake /proc and cgroup files."""

import os
from pathlib import Path

import pytest

from proa_engine.memory.host import SPINS, available_cores, read_memory, set_thread_variables, threads_per_rank

MEMINFO = "MemTotal: 16000000 kB\nMemFree: 1000 kB\nMemAvailable: 8000000 kB\nHugePages_Total: 0\n"
STATUS = "Name:\tpython\nVmRSS:\t  900 kB\nRssAnon:\t  500 kB\nRssFile:\t  300 kB\nRssShmem:\t  100 kB\n"


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    for name, text in {
        "proc/meminfo": MEMINFO,
        "proc/self/status": STATUS,
        "proc/self/cgroup": cgroup,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "0::/kubepods/pod1/engine\n"
V1 = "9:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        (V2, {"kubepods/pod1/engine/memory.max": "4096\n"}, 4096),
        (V2, {"kubepods/pod1/engine/memory.max": "max\n", "kubepods/pod1/memory.max": "8192\n"}, 8192),
        ("0::/\n", {"memory.max": "2048\n"}, 2048),
        ("0::/\n", {}, None),
        (V1, {"memory/docker/abc/memory.limit_in_bytes": "4096\n"}, 4096),
        (V1, {"memory/memory.limit_in_bytes": "1024\n"}, 1024),  # the path is the host's, the mount the container's
        (V1, {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    ],
)
def test_memory_limit_is_the_lowest_of_the_cgroup_and_its_parents(
    tmp_path: Path, cgroup: str, files: dict[str, str], limit: int | None
) -> None:
    memory = read_memory(machine(tmp_path, cgroup, files))
    assert memory.limit == limit
    assert memory.available == 8000000 * 1024
    assert memory.process == 600 * 1024


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        (V2, {"kubepods/pod1/engine/cpu.max": "200000 100000\n"}, 2),
        (V2, {"kubepods/pod1/engine/cpu.max": "50000 100000\n"}, 1),
        (V2, {"kubepods/pod1/engine/cpu.max": "max 100000\n"}, 8),
        (V1, {"cpu/docker/abc/cpu.cfs_quota_us": "350000\n", "cpu/docker/abc/cpu.cfs_period_us": "100000\n"}, 3),
        (V1, {"cpu/docker/abc/cpu.cfs_quota_us": "-1\n"}, 8),
    ],
)
def test_cores_are_limited_by_the_container_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert available_cores(machine(tmp_path, cgroup, files)) == cores


def test_this_machine_can_be_read() -> None:
    memory = read_memory()
    assert 0 < memory.process < memory.available
    assert available_cores() >= 1


def test_ranks_share_the_cores_and_each_has_at_least_one() -> None:
    assert [threads_per_rank(ranks, 4) for ranks in (1, 2, 3, 8)] == [4, 2, 1, 1]


def test_the_environment_decides_about_threads_if_it_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("GOMP_SPINCOUNT", "")  # so that it is restored
    monkeypatch.delenv("GOMP_SPINCOUNT")
    set_thread_variables(1)
    assert (os.environ["OMP_NUM_THREADS"], os.environ["GOMP_SPINCOUNT"]) == ("3", str(SPINS))
