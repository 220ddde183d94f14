"""Tiny models with each kind of KV cache, and equality of what two engines have generated with one of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.engine import Result
from support.tiny_models import make_tiny_model

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("qwen3", {}),
    "windows": (
        "gemma3_text",
        {"num_hidden_layers": 5, "layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 24},
    ),
    "latent": ("deepseek_v3", {}),
    "states": ("qwen3_next", {}),
}
"""Model type and options, by kind of cache."""


def make_cache_family(folder: Path, family: str) -> Path:
    """Write a model of a family of `FAMILIES` to a folder, and return it."""
    model_type, options = FAMILIES[family]
    return make_tiny_model(folder, model_type, seed=3, **options)


def assert_equal(ours: Sequence[Result], theirs: Sequence[Result]) -> None:
    """Equal tokens. Log probabilities may differ in the last bits: those of latent attention depend on chunks."""
    assert [each.token_ids for each in ours] == [each.token_ids for each in theirs]
    assert _logprobs(ours) == pytest.approx(_logprobs(theirs), abs=1e-4)


def _logprobs(of: Sequence[Result]) -> list[float]:
    return [entry.logprob for each in of for entry in each.logprobs]
