"""Adapters on a GPU: tokens equal those of merged weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from support import adapters
from support.adapters import ADAPTERS, assert_equal, generate, lora_modules, requests
from support.engine import build_core, run
from support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize(
    "config", [{}, {"enforce_eager": True}, {"batch_invariant": True}, {"max_num_batched_tokens": 48}]
)
def test_tokens_equal_those_of_merged_weights(config: dict[str, Any], tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen3", seed=3, head_dim=64)
    expected = {"": generate(adapters.load_plain(model))}
    for seed, adapter in enumerate(ADAPTERS):
        adapters.write_adapter(model, tmp_path / adapter.name, adapter, seed=seed)
        expected[adapter.name] = generate(adapters.merged(model, tmp_path / adapter.name, adapter))
    with build_core(
        model,
        device="cuda",
        dtype="float32",
        enable_lora=True,
        max_loras=2,
        lora_modules=lora_modules(tmp_path, *ADAPTERS),
        **config,
    ) as engine:
        results = run(engine, requests(list(expected)))
    assert_equal(results, expected)
