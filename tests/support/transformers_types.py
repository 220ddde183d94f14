"""Tiny random models of the causal language model types of the installed `transformers`."""

import logging
from typing import Any

import torch

VOCAB_SIZE = 96
LAYERS = 2

# Fields of configurations and their tiny values. Fields that a configuration does not have are left out.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "n_inner": 48,
    "num_hidden_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "num_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_layers": LAYERS,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "kv_channels": 8,
    "global_head_dim": 16,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "sliding_window": 7,
    "window_size": 7,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "intermediate_size_mlp": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 4,
    "query_pre_attn_scalar": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "rotary_dim": 8,
    "embedding_size": 32,
    "is_decoder": True,
    "index_block_size": 2,
    "index_topk_blocks": 2,
    "index_local_blocks": 1,
    "initializer_range": 0.2,
    "init_std": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

# What single types need beside or instead of it.
_MIXED = ["linear_attention", "full_attention"]
_NO_LEAST_STEP = {"time_step_min": 1e-9}  # by which the library limits steps in prompts, not in decodes
_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
EXTRA: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": _MIXED},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "attn_layer_indices": [1]},
    "cwm": _TOKENS,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "deepseek_v4": {"layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"]},
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "emu3": _TOKENS,
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_chunk_size": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16, "layer_types": _MIXED},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": _MIXED},
    "lfm2": {"layer_types": ["full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "lfm3": {"layer_types": ["full_attention", "conv"]},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "mllama": _TOKENS,
    "modernbert-decoder": _TOKENS,
    "nemotron_h": {"layers_block_type": _MIXED, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2}
    | _NO_LEAST_STEP,
    "olmo_hybrid": {"layer_types": _MIXED},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "qwen3_5_moe_text": {"layer_types": _MIXED},
    "qwen3_5_text": {"layer_types": _MIXED},
    "qwen3_next": {"layer_types": _MIXED},
    "zamba": {"layer_types": ["mamba", "hybrid"]},
    "zamba2": {"layer_types": ["mamba", "hybrid"], "hybrid_layer_ids": [1]} | _NO_LEAST_STEP,
    "zaya": {"num_experts_per_tok": 1},
    "plbart": {"decoder_attention_heads": 4, "encoder_attention_heads": 4},
    "whisper": {"decoder_attention_heads": 4, "encoder_attention_heads": 4},
    "reformer": {"is_decoder": True},
}
# Types whose parts besides the text model cannot be made tiny here.
NOT_TINY = ("blt", "git", "phi4_multimodal")


def model_types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str) -> Any:
    """A configuration of `model_type` with `LAYERS` layers. Raises what the configuration's class raises."""
    from transformers import CONFIG_MAPPING

    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    if model_type in NOT_TINY:
        raise ValueError("has parts that cannot be made tiny")
    config_class = CONFIG_MAPPING[model_type]
    extra = EXTRA.get(model_type, {})
    whole = config_class()
    text = whole.get_text_config(decoder=True)
    if text is not whole:
        return whole  # refused before a model is built
    fields = {name: value for name, value in SIZES.items() if name in text.to_dict() or name in text.attribute_map}
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds == {"sliding_attention", "full_attention"}:
        fields["layer_types"] = ["sliding_attention", "full_attention"]
    if "kv_lora_rank" in fields:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    return config_class(**(fields | extra))


def tiny_model(config: Any, seed: int = 0) -> Any:
    """The eager model of `config` with random weights, in float32."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        for parameter in model.parameters():  # biases and norms start as constants
            if parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn(parameter.shape)
    return model
