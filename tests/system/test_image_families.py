"""Greedy tokens behind images equal those of `transformers` for other families too, in chunks and preempted."""

from pathlib import Path

import pytest

from support.engine import build_core
from support.image_chats import make_case
from support.image_models import make_image_model


@pytest.mark.parametrize(
    ("model_type", "max_model_len", "num_blocks"),
    [
        *[("qwen2_5_vl", 140, 46), ("qwen3_5", 140, 48), ("qwen3_vl_moe", 140, 46)],
        *[("gemma3", 140, 60), ("mistral3", 160, 52)],
    ],
)
def test_tokens_equal_those_of_transformers(
    model_type: str, max_model_len: int, num_blocks: int, tmp_path: Path
) -> None:
    case = make_case(make_image_model(tmp_path / model_type, model_type, seed=1))
    settings = {"max_model_len": max_model_len, "block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    with build_core(case.folder, poison=True, block_seed=1, num_gpu_blocks_override=num_blocks, **settings) as engine:
        case.check(case.generate(engine))
        case.check(case.generate(engine))
        stats, counters = engine.core.stats(), engine.core.counters()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
    assert counters.images.num_hits > 0


@pytest.mark.parametrize("bidirectional", ["vision", None])
def test_tokens_of_gemma_4_equal_those_of_transformers(bidirectional: str | None, tmp_path: Path) -> None:
    """Whether its images' tokens attend to all of their image, in layers with windows, or not."""
    case = make_case(make_image_model(tmp_path, "gemma4", seed=1, use_bidirectional_attention=bidirectional))
    settings = {"max_model_len": 180, "block_size": 4, "max_num_batched_tokens": 96, "max_num_seqs": 8}
    with build_core(case.folder, poison=True, block_seed=1, num_gpu_blocks_override=84, **settings) as engine:
        case.check(case.generate(engine))
        case.check(case.generate(engine))
        stats, counters = engine.core.stats(), engine.core.counters()
    assert stats.prefix_cache_hits > 0
    assert counters.images.num_hits > 0
