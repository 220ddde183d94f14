"""Modules that an engine does without until it is ready, because they take long to import."""

import subprocess
import sys
from pathlib import Path

import pytest

# Of other packages, and parts of torch that `import torch` does not import.
NOT_TO_SERVE = (
    *("transformers", "PIL", "huggingface_hub", "opentelemetry.sdk"),
    *("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed._symmetric_memory"),
)
BEFORE_TORCH = """
import proa_engine.cli, proa_engine.server.serve, proa_engine.executor, proa_engine.preflight
assert "torch" not in sys.modules, "torch must be imported after the number of its threads is set"
"""
WATCHED = """
import gc
collections = []
def note(phase, info):
    if (torch := sys.modules.get("torch")) and getattr(torch.__spec__, "_initializing", False):
        collections.append(info)
gc.callbacks.append(note)
"""
LOADED = """
from proa_engine.config import EngineConfig
from proa_engine.engine_parts import load_engine
load_engine(EngineConfig(model="builtin", device="cpu"), lambda line: None).shutdown()
"""
RANK = """
import proa_engine.worker.main as worker
worker._accept = lambda listener: None  # no engine connects
assert worker.run_worker(1, 2, "{socket}") == 0
"""
NOT_COLLECTED = """
assert "torch" in sys.modules
assert not collections, "torch is imported with the garbage collector, which takes a tenth longer"
"""


def imported(program: str) -> set[str]:
    """Run a program in a process of its own. Returns the names of its modules at the end."""
    command = [sys.executable, "-c", f"import sys\n{program}\nprint(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True, timeout=110).stdout.split())


@pytest.fixture(scope="module")
def brought_by_torch() -> set[str]:
    return imported("import torch, triton")


def test_an_engine_is_ready_without_modules_that_only_other_programs_need(brought_by_torch: set[str]) -> None:
    modules = imported(BEFORE_TORCH + WATCHED + LOADED + NOT_COLLECTED)
    assert "torch" in modules
    assert not (modules - brought_by_torch) & set(NOT_TO_SERVE)


def test_another_rank_imports_torch_without_the_garbage_collector(tmp_path: Path) -> None:
    imported(WATCHED + RANK.format(socket=tmp_path / "rank") + NOT_COLLECTED)
