"""8-bit weights, activations and KV cache leave the built-in model's perplexity within a hundredth of what it is."""

from typing import Any

import pytest

from proa_engine import LLM
from support.perplexity import perplexity, unseen_documents

OPTIONS: tuple[dict[str, Any], ...] = ({}, {"quantization": "fp8", "kv_cache_dtype": "fp8"})


@pytest.mark.timeout(300)
def test_fp8_leaves_the_perplexity_within_one_percent() -> None:
    documents = unseen_documents(conversations=40, questions=40)
    plain, rounded = (
        perplexity(LLM("builtin", max_model_len=2048, num_gpu_blocks_override=1024, **options), documents)
        for options in OPTIONS
    )
    print(f"perplexity {plain:.5f}, in 8 bits {rounded:.5f}")
    assert plain != rounded
    assert abs(rounded / plain - 1) < 0.01
