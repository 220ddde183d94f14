"""What engines must have in common to exchange blocks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from proa_engine.builtin import builtin_model_folder
from proa_engine.config import EngineConfig
from proa_engine.layers.cache_layers import KeyValueLayer
from proa_engine.worker.cache_plan import plan_caches
from proa_engine.worker.fingerprint import cache_fingerprint
from support.tiny_models import make_tiny_model

LAYERS = [KeyValueLayer(2, 64), KeyValueLayer(2, 64)]
PLAN = plan_caches(LAYERS, 16, torch.float32, 512)


def fingerprint(**changed: Any) -> bytes:
    layers, plan = changed.pop("layers", LAYERS), changed.pop("plan", PLAN)
    dtypes = [changed.pop(name, torch.float32) for name in ("activations", "cache_dtype")]
    folder = changed.pop("folder", builtin_model_folder())
    config = EngineConfig(**{"model": "builtin", **changed})
    return cache_fingerprint(config, folder, layers, plan, *dtypes)


def test_two_engines_of_one_configuration_have_the_same() -> None:
    assert fingerprint() == fingerprint(max_num_seqs=3, kv_offloading_size=1.0)
    assert len(fingerprint()) == 32


def test_types_are_compared_not_the_options_that_choose_them(tmp_path: Path) -> None:
    assert fingerprint(dtype="float32", kv_cache_dtype="float32") == fingerprint()
    eight_bits = {"cache_dtype": torch.float8_e4m3fn}
    assert fingerprint(kv_cache_dtype="fp8", **eight_bits) == fingerprint(**eight_bits) != fingerprint()
    folder = make_tiny_model(tmp_path / "model", quantization_config={"quant_method": "fp8"})
    assert fingerprint(folder=folder, quantization="fp8") == fingerprint(folder=folder)


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "/other"},
        {"revision": "other"},
        {"load_format": "dummy"},
        {"load_format": "dummy", "seed": 1},
        {"activations": torch.bfloat16},
        {"quantization": "fp8"},
        {"batch_invariant": True},
        {"tensor_parallel_size": 2},
        {"enable_expert_parallel": True},
        {"hf_overrides": {"rope_parameters": {"factor": 2.0}}},
        {"layers": LAYERS[:1]},
        {"layers": [replace(LAYERS[0], window=32), LAYERS[1]]},
        {"plan": replace(PLAN, block_size=32)},
        {"plan": replace(PLAN, block_bytes=1)},
        {"cache_dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_engines_that_differ_have_different_ones(changed: dict[str, Any]) -> None:
    assert fingerprint(**changed) != fingerprint()
