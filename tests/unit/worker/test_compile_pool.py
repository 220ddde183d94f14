"""Compiling kernels in advance never keeps an engine from starting."""

import pytest

from proa_engine.config import EngineConfig
from proa_engine.worker import compile_pool
from proa_engine.worker.compile_pool import CompilePool


def test_a_pool_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "_GRACE_SECONDS", 0.0)
    line = CompilePool(EngineConfig(model="builtin"), 90, max_seconds=0.1).wait()
    assert line == (
        "kernel precompilation failed, kernels will be compiled on first launch: "
        "the program was ended by SIGKILL, its limit is 0.1 s"
    )
