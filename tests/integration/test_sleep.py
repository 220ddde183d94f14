"""An engine that sleeps frees its memory, and generates the same tokens after it woke up."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from proa.contract import SamplingParams
from proa_engine.core.operations import Operation, ResetPrefixCache, Sleep, SleepLevel, WakeUp
from proa_engine.memory.host import read_memory
from support.engine import Engine, build_core, request, run, tokens
from support.tiny_models import make_tiny_model

REQUESTS = [
    request("greedy", range(5, 45), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)),
    request("sampled", range(9, 29), SamplingParams(temperature=1.0, key=3, max_tokens=12, ignore_eos=True)),
]
WINDOWS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24}
CACHE_BYTES = 512 * 2**20  # each layer's part is over 32 MiB: glibc returns the memory of larger arrays at once


def operate(engine: Engine, operation: Operation[None]) -> None:
    done = engine.core.operate(operation)
    while not done.done():
        engine.core.step()


def touch_kv_cache(engine: Engine) -> None:
    """Untouched pages take no memory."""
    for cache in engine.executor._worker.model_runner.caches:
        for tensor in cache.tensors:
            tensor.zero_()


@pytest.mark.parametrize("level", [1, 2])
def test_the_tokens_are_the_same_after_a_sleep(level: SleepLevel) -> None:
    with build_core("builtin") as engine:
        before = tokens(run(engine, REQUESTS))
        for _ in range(2):
            operate(engine, Sleep(level))
            operate(engine, WakeUp())
            results = run(engine, REQUESTS)
            assert tokens(results) == before
            assert results["greedy"].num_cached_tokens == 0


@pytest.mark.parametrize("family", [{"architecture": "gemma3_text", **WINDOWS}, {"architecture": "qwen3_5_text"}])
def test_nothing_from_before_is_hit_in_windows_and_states(family: dict[str, Any], tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, seed=3, **family)
    wake_ups: list[list[Operation[None]]] = [[Sleep(1), WakeUp()], [Sleep(2), WakeUp()], [ResetPrefixCache()]]
    with build_core(folder, poison=True, block_size=8, max_num_seqs=8, kv_cache_memory_bytes=2**20) as engine:
        before = tokens(run(engine, REQUESTS))
        for operations in wake_ups:
            results = run(engine, REQUESTS)
            assert all(result.num_cached_tokens > 0 for result in results.values())
            for operation in operations:
                operate(engine, operation)
            results = run(engine, REQUESTS)
            assert tokens(results) == before
            assert not any(result.num_cached_tokens for result in results.values())


def test_a_sleeping_engine_has_no_kv_cache() -> None:
    with build_core("builtin", kv_cache_memory_bytes=CACHE_BYTES) as engine:
        touch_kv_cache(engine)
        before = read_memory().process
        operate(engine, Sleep(1))
        assert before - read_memory().process > 0.9 * CACHE_BYTES


def test_level_2_drops_the_weights_and_level_1_keeps_them() -> None:
    with build_core("builtin") as engine:
        worker: Any = engine.executor._worker
        model = weakref.ref(worker.weights.loaded.model)
        gc.collect()
        gc.disable()  # the engine's objects are frozen: what only a collection would free stays
        try:
            operate(engine, Sleep(1))
            assert model() is not None
            operate(engine, WakeUp())
            operate(engine, Sleep(2))
            assert model() is None
        finally:
            gc.enable()
        operate(engine, WakeUp())
        assert run(engine, REQUESTS)


def test_an_engine_that_sleeps_can_be_shut_down() -> None:
    with build_core("builtin") as engine:
        operate(engine, Sleep(2))
