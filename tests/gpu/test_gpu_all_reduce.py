"""All-reduces through symmetric memory on two GPUs or more. Skipped with fewer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from proa.contract import SamplingParams
from support.all_reduce_rank import check_all_ranks
from support.engine import build_core, request, run, tokens
from support.tiny_models import BYTES, make_tiny_model

NUM_GPUS = torch.cuda.device_count()
NUM_RANKS = [count for count in (2, 4, 8) if count <= NUM_GPUS]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS < 2, reason="fewer than two GPUs")]


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_every_rank_gets_the_sum_in_the_order_of_the_ranks(num_ranks: int, tmp_path: Path) -> None:
    check_all_ranks(num_ranks, tmp_path / "meeting", timeout=120)


def test_two_ranks_generate_the_tokens_that_they_do_with_nccl(tmp_path: Path) -> None:
    """The sum of two numbers has the same bits in either order."""
    folder = make_tiny_model(tmp_path, "qwen3", head_dim=64)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    wanted = [request(str(i), [(i * 37 + place * 5) % BYTES for place in range(2 + 9 * i)], params) for i in range(12)]
    results = []
    for disabled in (True, False):
        settings: dict[str, Any] = {"device": "cuda", "max_num_seqs": 8, "disable_custom_all_reduce": disabled}
        with build_core(folder, tensor_parallel_size=2, **settings) as engine:
            results.append(tokens(run(engine, wanted)))
    assert results[0] == results[1]
