"""Two ranks that share the images of a step generate the tokens of `transformers`."""

from pathlib import Path
from typing import Any

import pytest

from proa_engine.json_configs import SpeculativeConfig
from support.engine import build_core
from support.image_chats import make_case
from support.image_models import make_image_model

NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)


@pytest.mark.parametrize(
    "config", [{}, {"max_num_batched_tokens": 40, "num_gpu_blocks_override": 46, "speculative_config": NGRAM}]
)
def test_tokens_of_two_ranks_equal_those_of_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    case = make_case(make_image_model(tmp_path / "model", "qwen3_vl", seed=1))
    settings = {"max_model_len": 140, "block_size": 4} | config
    with build_core(case.folder, tensor_parallel_size=2, **settings) as engine:
        case.check(case.generate(engine))
        if not config:
            assert max(len(plan.encoder_inputs) for plan in engine.plans) > 1
