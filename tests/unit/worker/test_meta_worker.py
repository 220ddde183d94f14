"""The worker that finds out, before the weights are loaded, which kernels to compile."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from proa_engine.config import EngineConfig
from proa_engine.layers.cache_layers import StateLayer
from proa_engine.memory.kv_cache import CacheSizes
from proa_engine.models import read_config
from proa_engine.option_groups import KvTiers, Parallel
from proa_engine.worker import memory_budget
from proa_engine.worker.meta_worker import MetaWorker, run_starts, with_one_layer_of_each_kind
from support import shape_models
from support.tiny_models import make_tiny_model


def test_the_first_layer_and_one_of_each_kind_after_it_are_kept(tmp_path: Path) -> None:
    config = read_config.from_folder(make_tiny_model(tmp_path, "olmo3", num_hidden_layers=8, sliding_window=8))
    window, full = config.layers[0], config.layers[3]
    assert window != full
    assert config.layers == (window, window, window, full) * 2
    assert with_one_layer_of_each_kind(config).layers == (window, window, full)


@pytest.mark.parametrize(
    ("fields", "ranks"),
    [
        ({}, [0]),
        ({"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 5}, [0, 1]),
        ({"attention_bias": True}, [0, 1]),  # one rank adds the bias of the output
    ],
)
def test_the_last_rank_is_started_too_if_its_matrices_have_other_shapes(
    fields: dict[str, Any], ranks: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def start(worker: MetaWorker, sizes: CacheSizes) -> None:
        started.append(worker._rank)

    monkeypatch.setattr(MetaWorker, "start", start)
    run_starts(EngineConfig(model=str(make_tiny_model(tmp_path, **fields)), parallel=Parallel(tensor_parallel_size=2)))
    assert started == ranks


def test_each_pipeline_stage_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[int, int]] = []

    def start(worker: MetaWorker, sizes: CacheSizes) -> None:
        started.append((worker._rank, worker.model_config.stage.index))

    monkeypatch.setattr(MetaWorker, "start", start)
    folder = make_tiny_model(tmp_path, num_hidden_layers=4)
    run_starts(EngineConfig(model=str(folder), parallel=Parallel(tensor_parallel_size=2, pipeline_parallel_size=3)))
    assert started == [(0, 0), (2, 1), (4, 2)]


@pytest.mark.parametrize(
    ("model", "num_ranks", "kv_heads"),
    [
        (shape_models.GLM4_9B, 4, [1, 1]),
        (shape_models.QWEN35_35B_A3B, 8, [1, 1]),
        (shape_models.QWEN3_30B_A3B, 8, [1, 1]),
        (shape_models.GEMMA3_4B, 8, [1, 1]),
        (shape_models.GPT_OSS_20B, 8, [1, 1]),
        (shape_models.GLM_47_FLASH, 8, [None, None]),  # 20 heads with latent attention
        (shape_models.LLAMA_8B, 3, [3, 2]),
    ],
)
def test_published_models_are_loaded_by_ranks_that_do_not_divide_their_kv_heads(
    model: shape_models.Fields, num_ranks: int, kv_heads: list[int | None], tmp_path: Path
) -> None:
    folder = str(shape_models.make_shape_model(tmp_path, model))
    for rank, expected in zip((0, num_ranks - 1), kv_heads, strict=True):
        worker = MetaWorker(
            EngineConfig(model=folder, dtype="bfloat16", parallel=Parallel(tensor_parallel_size=num_ranks)), rank
        )
        worker.init_device()
        worker.load_model()
        layers = worker.weights.loaded.model.cache_layers()
        assert {getattr(layer, "num_kv_heads", None) for layer in layers if not isinstance(layer, StateLayer)} == {
            expected
        }


def test_it_starts_no_threads_where_spans_are_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    num_threads = threading.active_count()
    MetaWorker(EngineConfig(model="builtin"))
    assert threading.active_count() == num_threads


def test_a_tiny_model_on_a_gpu_gets_no_more_blocks_than_requests_and_prefixes_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = MetaWorker(EngineConfig(model="builtin"))
    worker.init_device()
    worker.load_model()
    gpu = replace(worker._placement, device=torch.device("cuda"))
    monkeypatch.setattr(worker, "_placement", gpu)
    monkeypatch.setattr(memory_budget, "_gpu_bytes", lambda *_: 100 * 2**30)
    assert 100 * 2**30 // worker._caches.block_bytes > 2_000_000
    assert worker._sizes_that_fit().num_blocks == 1 << 17


def test_an_engine_with_a_mover_has_the_kernels_of_one_without(tmp_path: Path) -> None:
    config = EngineConfig(
        model="builtin", kv_tiers=KvTiers(kv_offloading_size=0.01, kv_offloading_path=str(tmp_path / "arenas"))
    )
    worker = MetaWorker(config)
    worker.init_device()
    assert worker.load_model().cache.num_host_pages > 0
    assert not (tmp_path / "arenas").exists()
