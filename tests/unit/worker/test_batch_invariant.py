"""batch_invariant: refused by name where a GPU could not keep it, and nothing new to a CPU, which always does."""

from pathlib import Path
from typing import Any

import pytest

from proa_engine.config import EngineConfig
from proa_engine.models.config import ModelConfig
from proa_engine.worker.meta_worker import MetaWorker
from proa_engine.worker.worker import Worker
from support.tiny_models import make_tiny_model

BEYOND_IT: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"quantization": "fp8"}, "batch_invariant on a GPU is not supported with quantized weights"),
    ("qwen3_moe", {}, "batch_invariant on a GPU is not supported with a mixture of experts"),
    ("llama", {"tensor_parallel_size": 2}, "not supported with tensor_parallel_size 2, only with 1"),
]


@pytest.mark.parametrize(("architecture", "settings", "sentence"), BEYOND_IT)
def test_what_a_gpu_cannot_keep_is_refused_when_the_engine_starts(
    architecture: str, settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, architecture)
    worker = MetaWorker(EngineConfig(model=str(folder), batch_invariant=True, **settings))
    with pytest.raises(ValueError, match=sentence):
        worker.init_device()


@pytest.mark.parametrize(("architecture", "settings"), [case[:2] for case in BEYOND_IT])
def test_on_a_cpu_nothing_changes(architecture: str, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, architecture)
    worker = Worker(
        EngineConfig(model=str(folder), device="cpu", batch_invariant=True, **settings), 0, lambda line: None
    )
    worker.init_device()
    as_without_it = ModelConfig.from_folder(folder, settings.get("quantization"))
    assert type(worker.model_config.linear_method) is type(as_without_it.linear_method)
    assert not worker.model_config.batch_invariant
