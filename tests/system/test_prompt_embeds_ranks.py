"""Prompt embeddings with several ranks: each rank of the first stage puts them in the place of tokens."""

from pathlib import Path
from typing import Any

import pytest

from support.engine import build_core, request, run
from support.parallel_equality import CONFIG, GREEDY, PROMPTS, assert_equal_where_sure, generate
from support.prompt_embeds import input_embeddings, whole
from support.tiny_models import make_tiny_model


@pytest.mark.parametrize(
    "ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tensor", "stages"]
)
def test_tokens_behind_embeddings_equal_those_of_one_rank_behind_tokens(ranks: dict[str, Any], tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama", seed=3)
    with build_core(folder, **CONFIG) as engine:
        expected = generate(engine, "tokens", PROMPTS)
    values = input_embeddings(folder, PROMPTS)
    with build_core(folder, **CONFIG, **ranks, num_gpu_blocks_override=40, enable_prompt_embeds=True) as engine:
        requests = [whole(request(str(index), prompt, GREEDY), values[index]) for index, prompt in enumerate(PROMPTS)]
        assert_equal_where_sure(list(run(engine, requests).values()), expected)
        assert engine.core.stats().num_preemptions > 0
