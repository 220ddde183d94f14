"""batch_invariant: rejected where a GPU does not support it, and without effect on a CPU, which always is."""

from pathlib import Path
from typing import Any

import pytest

from proa_engine.config import EngineConfig
from proa_engine.models import read_config
from proa_engine.worker.meta_worker import MetaWorker
from proa_engine.worker.worker import Worker
from support.tiny_models import LATENT, make_tiny_model

UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"quantization": "fp8"}, "batch_invariant on a GPU is not supported with quantized weights"),
    ("qwen3_moe", {}, "batch_invariant on a GPU is not supported with a mixture of experts"),
    ("llama", {"tensor_parallel_size": 2}, "not supported with tensor_parallel_size 2, only with 1"),
]


@pytest.mark.parametrize(("architecture", "settings", "message"), UNSUPPORTED)
def test_unsupported_settings_are_rejected_on_a_gpu_when_the_engine_starts(
    architecture: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, architecture)
    worker = MetaWorker(EngineConfig.from_options(model=str(folder), batch_invariant=True, **settings))
    with pytest.raises(ValueError, match=message):
        worker.init_device()


def test_latent_attention_is_rejected_on_a_gpu_in_a_model_without_experts(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "deepseek_v3", **(LATENT | {"first_k_dense_replace": 3}))
    worker = MetaWorker(EngineConfig(model=str(folder), batch_invariant=True))
    with pytest.raises(ValueError, match="batch_invariant on a GPU is not supported with latent attention"):
        worker.init_device()


@pytest.mark.parametrize(("architecture", "settings"), [case[:2] for case in UNSUPPORTED])
def test_it_changes_nothing_on_a_cpu(architecture: str, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, architecture)
    worker = Worker(
        EngineConfig.from_options(model=str(folder), device="cpu", batch_invariant=True, **settings),
        0,
        lambda line: None,
    )
    worker.init_device()
    without = read_config.from_folder(folder, settings.get("quantization"))
    assert type(worker.model_config.linear_method) is type(without.linear_method)
    assert not worker.model_config.batch_invariant
