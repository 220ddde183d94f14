"""Model folders with the shapes of real models: only a config.json."""

import json
from pathlib import Path
from typing import Any

Fields = dict[str, Any]  # of a config.json


def _fields(architecture: str, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> Fields:
    return {
        "architectures": [architecture],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "num_hidden_layers": 2,
        "max_position_embeddings": 4096,
        "eos_token_id": 2,
    } | more


LLAMA_8B = _fields("LlamaForCausalLM", 4096, 14336, 32, 8, 128256)
MISTRAL_7B = _fields("MistralForCausalLM", 4096, 14336, 32, 8, 32000, sliding_window=4096)
QWEN2_05B = _fields("Qwen2ForCausalLM", 896, 4864, 14, 2, 151936)
QWEN3_06B = _fields("Qwen3ForCausalLM", 1024, 3072, 16, 8, 151936, head_dim=128, tie_word_embeddings=True)
WIDE_HEADS = QWEN3_06B | {"head_dim": 256}
WIDEST_HEADS = QWEN3_06B | {"head_dim": 512, "num_key_value_heads": 2}
QWEN3_30B_A3B = _fields("Qwen3MoeForCausalLM", 2048, 6144, 32, 4, 151936, head_dim=128) | {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA2_9B = _fields("Gemma2ForCausalLM", 3584, 14336, 16, 8, 256000, num_hidden_layers=4) | _GEMMA
GEMMA3_4B = _fields("Gemma3ForConditionalGeneration", 2560, 10240, 8, 4, 262208, num_hidden_layers=4, head_dim=256)
GEMMA3_4B |= _GEMMA | {"sliding_window": 1024}
GEMMA3_4B["vision_config"] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "image_size": 896,
    "patch_size": 14,
}
GEMMA4_E4B = _fields("Gemma4ForCausalLM", 2560, 10240, 8, 2, 262144, num_hidden_layers=4) | _GEMMA
GEMMA4_E4B |= {"num_kv_shared_layers": 2, "attention_k_eq_v": True}
GLM4_9B = _fields("Glm4ForCausalLM", 4096, 13696, 32, 2, 151552, head_dim=128)
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
GPT_OSS_20B = _fields("GptOssForCausalLM", 2880, 2880, 64, 8, 201088, head_dim=64) | {
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
    "quantization_config": MXFP4,
}
GPT_OSS_120B = GPT_OSS_20B | {"num_local_experts": 128}

GLM_47_FLASH = _fields("Glm4MoeLiteForCausalLM", 2048, 10240, 20, 20, 154880) | {
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "norm_topk_prob": True,
}
_GATED_DELTA_NET = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
QWEN35_4B = _fields("Qwen3_5ForCausalLM", 2560, 9216, 16, 4, 248320, head_dim=256) | _GATED_DELTA_NET
QWEN35_35B_A3B = (
    _fields("Qwen3_5MoeForCausalLM", 2048, 0, 16, 2, 248320, head_dim=256)
    | _GATED_DELTA_NET
    | {
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }
)
DFLASH_QWEN35_35B_A3B = _fields("DFlashDraftModel", 2048, 6144, 32, 4, 248320, head_dim=128) | {
    "model_type": "qwen3",
    "block_size": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 2048,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 2, 3]},
}
DSPARK_QWEN3_06B = _fields("Qwen3DSparkModel", 1024, 3072, 16, 8, 151936, head_dim=128) | {
    "model_type": "qwen3",
    "block_size": 7,
    "mask_token_id": 151669,
    "target_layer_ids": [0, 1],
    "markov_rank": 256,
}
LFM2_8B_A1B = _fields("Lfm2MoeForCausalLM", 2048, 7168, 32, 8, 65536) | {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "conv", "full_attention"],
    "num_dense_layers": 1,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1792,
}
NEMOTRON_3_NANO = _fields("NemotronHForCausalLM", 2688, 1856, 32, 2, 131072, head_dim=128) | {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
}
GRANITE_4_TINY = _fields("GraniteMoeHybridForCausalLM", 1536, 512, 12, 4, 100352) | {
    "layer_types": ["mamba", "attention"],
    "num_local_experts": 64,
    "num_experts_per_tok": 6,
    "shared_intermediate_size": 1024,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
}

WHISPER_TURBO = {
    "architectures": ["WhisperForConditionalGeneration"],
    "is_encoder_decoder": True,
    "activation_function": "gelu",
    "d_model": 1280,
    "num_mel_bins": 128,
    "encoder_layers": 2,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "decoder_layers": 2,
    "decoder_attention_heads": 20,
    "decoder_ffn_dim": 5120,
    "max_target_positions": 448,
    "vocab_size": 51866,
    "decoder_start_token_id": 50258,
    "eos_token_id": 50257,
}

FP8_STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _INT8 | {"strategy": "channel"},
            "input_activations": _INT8 | {"strategy": "token", "dynamic": True},
        }
    },
}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
_MXFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
MXFP4_PACKED = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _MXFP4}},
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
GPTQ_OUT_OF_ORDER = GPTQ | {"desc_act": True}
GPTQ_8_BITS = GPTQ | {"bits": 8}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
AWQ_GROUPS_OF_32 = AWQ | {"group_size": 32}
GGUF = {"quant_method": "gguf", "modules": {"Q4_K": ["self_attn", "gate_proj", "up_proj"], "Q8_0": ["down_proj"]}}


def stored_as(model: Fields, quantization: dict[str, Any]) -> Fields:
    return model | {"quantization_config": quantization}


def make_shape_model(folder: Path, fields: Fields) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder
