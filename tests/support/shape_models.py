"""Models without weights: the shapes of real ones, on meta tensors."""

from pathlib import Path
from typing import Any

import torch

from proa_engine.kernels.draw_tokens import draw_tokens
from proa_engine.kernels.sampling_params import NUM_COLUMNS
from proa_engine.layers.attention_metadata import AttentionMetadata
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models.base import CausalLM
from proa_engine.models.config import ModelConfig
from proa_engine.models.loader import load_model

META = torch.device("meta")


def _config(
    architecture: str, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> ModelConfig:
    fields = {
        "architectures": [architecture],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "num_hidden_layers": 1,
        "max_position_embeddings": 4096,
    }
    return ModelConfig.from_dicts(fields | more, {})


REAL_MODELS = {
    "Llama-3.1-8B": _config("LlamaForCausalLM", 4096, 14336, 32, 8, 128256),
    "Mistral-7B-v0.1": _config("MistralForCausalLM", 4096, 14336, 32, 8, 32000, sliding_window=4096),
    "Qwen2.5-0.5B": _config("Qwen2ForCausalLM", 896, 4864, 14, 2, 151936),
    "Qwen3-0.6B": _config("Qwen3ForCausalLM", 1024, 3072, 16, 8, 151936, head_dim=128),
}


def shape_model(config: ModelConfig, dtype: torch.dtype) -> CausalLM:
    return load_model(
        Path(),
        config,
        dtype=dtype,
        device=META,
        parallel=ParallelContext(),
        load_format="dummy",
        report=lambda line: None,
    )


def run_shapes(model: CausalLM, dtype: torch.dtype, *, num_decodes: int, num_tokens: int, num_requests: int) -> None:
    """One step of a batch of this shape, through all layers and to its tokens."""
    integers = {"dtype": torch.int32, "device": META}
    positions = torch.empty(num_tokens, dtype=torch.int64, device=META)
    metadata = AttentionMetadata(
        query_start_loc=torch.empty(num_requests + 1, **integers),
        seq_lens=torch.empty(num_requests, **integers),
        block_table=torch.empty(num_requests, 33, **integers),
        slot_mapping=positions,
        num_decodes=num_decodes,
    )
    kv_cache = torch.empty(model.kv_cache_shape(64, 16), dtype=dtype, device=META)
    hidden = model(positions, positions, [kv_cache], metadata)
    logits = model.compute_logits(hidden[:num_requests])
    params = torch.empty(64, NUM_COLUMNS, dtype=torch.float64, device=META)
    for has_limits in (False, True):
        draw_tokens(logits, params, positions[:num_requests], positions[:num_requests], has_limits=has_limits)
