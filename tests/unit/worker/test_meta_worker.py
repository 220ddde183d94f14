"""The worker that finds out, before the weights are loaded, which kernels to compile."""

import threading
from pathlib import Path

import pytest
import torch

from proa_engine.config import EngineConfig
from proa_engine.models.config import ModelConfig
from proa_engine.worker.meta_worker import MetaWorker, with_one_layer_of_each_kind
from support.tiny_models import make_tiny_model


def test_the_first_layer_and_one_of_each_kind_after_it_are_kept(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(make_tiny_model(tmp_path, "olmo3", num_hidden_layers=8, sliding_window=8))
    window, full = config.layers[0], config.layers[3]
    assert window != full
    assert config.layers == (window, window, window, full) * 2
    assert with_one_layer_of_each_kind(config).layers == (window, window, full)


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
    monkeypatch.setattr(worker, "device", torch.device("cuda"))
    monkeypatch.setattr(worker, "_cuda_budget", lambda: 100 * 2**30)
    plan = worker._plan
    assert 100 * 2**30 // plan.block_bytes > 2_000_000
    assert worker._sizes_that_fit(plan).num_blocks == 1 << 17
