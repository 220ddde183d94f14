"""CompilePool compiles the kernels that a worker then launches."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from proa_engine.config import EngineConfig
from proa_engine.worker import compile_pool
from proa_engine.worker.compile_pool import CompilePool
from proa_engine.worker.known_kernels import GpuKind
from support.shape_models import QWEN3_06B, make_shape_model

TESTS = Path(__file__).parents[1]
TRACING = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}  # an exporter has threads, and the pool forks


def test_a_second_start_and_a_worker_find_every_kernel_that_the_pool_compiled(tmp_path: Path) -> None:
    model = make_shape_model(tmp_path, QWEN3_06B)
    result = subprocess.run(
        [sys.executable, "-m", "support.fake_gpu", str(model), str(tmp_path / "cache")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])} | TRACING,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    first, second, *kernels = result.stdout.splitlines()
    assert (match := re.fullmatch(r"compiled (\d+) kernels in [0-9.]+ s, 0 of (\d+) were in the cache", first)), first
    assert match[1] == match[2]
    assert re.fullmatch(rf"compiled 0 kernels in [0-9.]+ s, {match[1]} of {match[1]} were in the cache", second), second
    assert len(kernels) >= 10
    assert all(line.startswith("found ") for line in kernels), kernels


def test_in_whichever_order_kernels_are_compiled_they_have_the_same_keys_in_the_cache() -> None:
    """The pool's processes take kernels from a queue, a worker compiles them as it launches them."""
    command, paths = [sys.executable, "-m", "support.kernel_keys"], os.pathsep.join([str(TESTS), *sys.path])
    forwards, backwards = (
        subprocess.run(
            [*command, *order], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for order in ([], ["backwards"])
    )
    assert len(forwards) > 30
    assert sorted(forwards) == sorted(backwards)


def test_a_pool_ends_by_itself_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "_GRACE_SECONDS", 60.0)  # it imports torch first, on a loaded machine
    line = CompilePool(EngineConfig(model="builtin"), max_seconds=0.01).wait()
    assert line.endswith("the program was ended by SIGALRM, its limit is 0.01 s")


COMPILE = """
import time
from proa_engine.config import EngineConfig
from proa_engine.worker.compile_pool import CompilePool
from proa_engine.worker.known_kernels import GpuKind

pool = CompilePool(EngineConfig(model="builtin"))
pool.compile(GpuKind(90, 132))
print(pool._process.pid, flush=True)
time.sleep(100)
"""


def test_a_pool_ends_with_an_engine_that_is_killed(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", COMPILE], env=environment, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        program = int(engine.stdout.readline())
        children = stop_compilation(program, tmp_path)
        engine.kill()
    wait_for_end([program, *children])


def test_a_pool_that_is_closed_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the start closes it that fails."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pool = CompilePool(EngineConfig(model="builtin"))
    pool.compile(GpuKind(90, 132))
    assert pool._process is not None
    children = stop_compilation(pool._process.pid, tmp_path)
    pool.close()
    wait_for_end(children)


def stop_compilation(program: int, cache: Path) -> list[int]:
    """Stop the program's children once they have begun to compile, so that they do not end by themselves. Returns their
    process ids."""
    deadline = time.monotonic() + 60.0
    while not any(cache.glob("*/*.ttir")):
        assert time.monotonic() < deadline, "no kernel was compiled"
        time.sleep(0.05)
    children = [int(pid) for pid in Path(f"/proc/{program}/task/{program}/children").read_text().split()]
    assert children
    for child in children:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(child, signal.SIGSTOP)
    return children


def wait_for_end(processes: Iterable[int]) -> None:
    deadline = time.monotonic() + 10.0
    while running := [pid for pid in processes if is_running(pid)]:
        if time.monotonic() > deadline:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"processes {running} run on")
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # empty once it has ended, until it is waited for
    except (FileNotFoundError, ProcessLookupError):
        return False
