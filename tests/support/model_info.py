"""What an engine says of its model, with defaults for tests."""

from dataclasses import replace
from typing import Any

from proa.contract import ModelInfo

_INFO = ModelInfo(
    model_name="m",
    model="/m",
    max_model_len=64,
    vocab_size=100,
    block_size=16,
    num_gpu_blocks=8,
    block_hash_version=1,
    max_num_seqs=4,
    max_logprobs=5,
    max_waiting_requests=9,
    engine_version="0",
    max_num_batched_tokens=64,
    prefix_caching=True,
)


def model_info(**changes: Any) -> ModelInfo:
    return replace(_INFO, **changes)
