"""Pooled requests on two ranks have the values of one rank."""

from pathlib import Path
from typing import Any

import torch

from proa.contract import PoolingParams, PoolingTask
from support.engine import build_core, pooled, run
from support.pooling_models import make_embedding_model
from support.tiny_models import BYTES

PROMPTS = [[(index * 37 + place * 5) % BYTES for place in range(1 + 9 * index)] for index in range(10)]
TASKS = [
    PoolingParams(task=PoolingTask.EMBED),
    PoolingParams(task=PoolingTask.TOKEN_EMBED),
    PoolingParams(task=PoolingTask.TOKEN_LOGPROBS, score_token_ids=(1, 200)),
]
REQUESTS = [
    pooled(f"{params.task.name} {number}", prompt, params) for number, prompt in enumerate(PROMPTS) for params in TASKS
]


def test_two_ranks_give_the_values_of_one(tmp_path: Path) -> None:
    folder = make_embedding_model(
        tmp_path, "mean_tokens", dense=(40,), normalize=True, architecture="qwen3", max_position_embeddings=128
    )
    config: dict[str, Any] = {"max_num_batched_tokens": 64, "block_size": 8}
    with build_core(folder, **config) as engine:
        expected = run(engine, REQUESTS)
    with build_core(folder, tensor_parallel_size=2, **config) as engine:
        actual = run(engine, REQUESTS)
    for name, result in expected.items():
        torch.testing.assert_close(actual[name].values, result.values, rtol=1e-4, atol=1e-4)
