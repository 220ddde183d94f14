"""Compiling kernels in advance never keeps an engine from starting."""

from pathlib import Path

import pytest

from proa_engine.config import Device, EngineConfig
from proa_engine.worker import compile_pool
from proa_engine.worker.compile_pool import CompilePool, begin_compile_pool
from proa_engine.worker.known_kernels import GpuKind


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def test_a_pool_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "_GRACE_SECONDS", 0.0)
    line = CompilePool(EngineConfig(model="builtin"), max_seconds=0.1).wait()
    assert line == (
        "kernel precompilation failed, kernels will be compiled on first launch: "
        "the program was ended by SIGKILL, its limit is 0.1 s"
    )


def test_a_pool_that_is_closed_ends_at_once() -> None:
    pool = CompilePool(EngineConfig(model="builtin"))
    pool.compile(GpuKind(90, 132))
    pool.close()
    assert pool.wait().endswith("the program was ended by SIGKILL, its limit is 180 s")
    pool.close()


@pytest.mark.parametrize(("device", "has_driver"), [("cpu", True), ("auto", False)])
def test_no_pool_is_begun_where_no_gpu_is_used(
    device: Device, has_driver: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compile_pool, "_DRIVER", tmp_path if has_driver else tmp_path / "version")
    assert begin_compile_pool(EngineConfig(model="builtin", device=device)) is None
