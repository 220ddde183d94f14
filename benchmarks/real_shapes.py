"""Configurations of the models that are benchmarked, with random weights.

    python -m benchmarks.real_shapes Qwen3-0.6B FOLDER

writes a folder that engines can serve: config.json and a tokenizer.
"""

import argparse
import json
from pathlib import Path
from typing import Any

_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 40960,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
_EVERY_OTHER = ["sliding_attention", "full_attention"]
_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "eos_token_id": 200002,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _QWEN3
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "eos_token_id": 128009,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
    },
    "gpt-oss-20b": _GPT_OSS | {"num_local_experts": 32, "num_hidden_layers": 24, "layer_types": _EVERY_OTHER * 12},
    "gpt-oss-120b": _GPT_OSS | {"num_local_experts": 128, "num_hidden_layers": 36, "layer_types": _EVERY_OTHER * 18},
    "Qwen3-30B-A3B": _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "Qwen3-VL-8B": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "tie_word_embeddings": False,
        "text_config": _QWEN3
        | {
            "model_type": "qwen3_vl_text",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "attention_bias": False,
            "max_position_embeddings": 262144,
            "rope_theta": 5_000_000.0,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": 27,
            "hidden_size": 1152,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": 4304,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 4096,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    },
    "Qwen3.5-35B-A3B": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "eos_token_id": 248046,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
    },
    "LFM2-8B-A1B": {
        "architectures": ["Lfm2MoeForCausalLM"],
        "model_type": "lfm2_moe",
        "vocab_size": 65536,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "num_hidden_layers": 24,
        "num_dense_layers": 2,
        "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1792,
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 128000,
        "tie_word_embeddings": True,
        "eos_token_id": 7,
        "torch_dtype": "bfloat16",
    },
    "Nemotron-3-Nano": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "vocab_size": 131072,
        "hidden_size": 2688,
        "intermediate_size": 1856,
        "num_hidden_layers": 52,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "mlp_hidden_act": "relu2",
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "eos_token_id": 11,
        "torch_dtype": "bfloat16",
    },
}
# As most 4- and 8-bit checkpoints of these models are
_INT4 = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
_NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
_INT = {"num_bits": 8, "type": "int", "symmetric": True}
_INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _INT | {"strategy": "channel"},
            "input_activations": _INT | {"strategy": "token", "dynamic": True},
        }
    },
}
SHAPES |= {
    f"{name} {kind}": SHAPES[name] | {"quantization_config": quantization}
    for name in ("Llama-3.1-8B", "Qwen3-30B-A3B")
    for kind, quantization in (("int4", _INT4), ("int8", _INT8), ("nvfp4", _NVFP4))
}
# Layers that propose draft tokens for a model of SHAPES
DRAFTERS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B EAGLE-3": SHAPES["Llama-3.1-8B"]
    | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000},
    "Qwen3.5-35B-A3B DFlash": {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": 248320,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 8,
        "layer_types": ["sliding_attention"] * 7 + ["full_attention"],
        "sliding_window": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000_000.0,
        "max_position_embeddings": 262144,
        "block_size": 16,
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 10, 19, 28, 37]},
    },
}


def write_model(name: str, folder: Path, layers: int | None = None) -> Path:
    """Write a SHAPES model's config.json to `folder` and return `folder`; any other name is itself a folder. `layers`:
    as many instead of all."""
    if name not in SHAPES:
        return Path(name)
    changes = {} if layers is None else {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(SHAPES[name] | changes))
    return folder


def write_drafter(name: str, folder: Path) -> Path:
    """As `write_model`, of DRAFTERS. Makes the folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DRAFTERS[name]))
    return folder


def has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level tokenizer in which every token is one word, so that random tokens decode to text. Its class is
    for engines that load it by `transformers`."""
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "BPE", "vocab": {f"Ġ{token:x}": token for token in range(vocab_size)}, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[arguments.model]
    write_model(arguments.model, arguments.folder)
    write_tokenizer(arguments.folder, config.get("text_config", config)["vocab_size"])


if __name__ == "__main__":
    main()
