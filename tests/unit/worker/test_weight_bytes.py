"""The estimate of a rank's weights is what the rank with the most holds."""

from pathlib import Path
from typing import Any

import pytest
import torch

from proa_engine.memory.kv_cache import weight_bytes
from proa_engine.models import read_config
from proa_engine.models.loader import load_model
from proa_engine.worker.meta_worker import MetaParallel

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 1024,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,  # tables of rotations are not estimated
}
QWEN3_NEXT = LLAMA | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 16,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}


@pytest.mark.parametrize(
    "fields", [LLAMA, QWEN3_NEXT, DEEPSEEK], ids=["copied KV heads", "gated delta nets", "latents"]
)
@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_copied_heads_and_latents_count_on_each_rank(fields: dict[str, Any], num_ranks: int) -> None:
    config = read_config.from_dicts(fields | {"intermediate_size": 528 if num_ranks == 3 else 512}, {})
    model = load_model(
        Path(),
        config,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        parallel=MetaParallel(0, num_ranks, None),
        load_format="dummy",
        report=lambda line: None,
    )
    held = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())

    assert 0.97 * held < weight_bytes(config, 2, num_ranks) < 1.01 * held
