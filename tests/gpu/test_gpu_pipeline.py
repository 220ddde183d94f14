"""Pipeline stages on two GPUs or more. Skipped with fewer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from proa.contract import SamplingParams
from support.engine import build_core, request, run, tokens
from support.tiny_models import BYTES, make_tiny_model

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS < 2, reason="fewer than two GPUs")]


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize(("num_stages", "num_ranks"), [(2, 1), (2, 2)])
def test_stages_generate_the_tokens_of_one_gpu(
    num_stages: int, num_ranks: int, enforce_eager: bool, tmp_path: Path
) -> None:
    if num_stages * num_ranks > NUM_GPUS:
        pytest.skip(f"{NUM_GPUS} GPUs")
    folder = make_tiny_model(tmp_path, "qwen3", head_dim=64, num_hidden_layers=5)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    wanted = [request(str(i), [(i * 37 + place * 5) % BYTES for place in range(2 + 9 * i)], params) for i in range(12)]
    settings: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "enforce_eager": enforce_eager,
    }
    with build_core(folder, **settings) as engine:
        expected = tokens(run(engine, wanted))
    stages: dict[str, Any] = {"pipeline_parallel_size": num_stages, "tensor_parallel_size": num_ranks}
    with build_core(folder, **settings, **stages) as engine:
        assert tokens(run(engine, wanted)) == expected
