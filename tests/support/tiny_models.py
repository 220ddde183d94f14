"""Builders of tiny Hugging Face model folders: random weights and a byte-level tokenizer, made in an instant."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

BYTES = 256
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = BYTES + len(SPECIAL_TOKENS)  # one token a byte
EOS_TOKEN_ID = BYTES + 2

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

RECURRENT = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")

# Fields of mixtures of experts
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True}
_QWEN3_NEXT = _EXPERTS | {"shared_expert_intermediate_size": 32}
MIXTURES: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        "n_routed_experts": 12,
        "n_group": 3,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
    },
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 24,
        "swiglu_limit": 1.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 8.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "olmoe": _EXPERTS,
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 80},
    "qwen3_5_moe_text": _QWEN3_NEXT,
    "qwen3_moe": _EXPERTS,
    "qwen3_next": _QWEN3_NEXT,
}


_LFM2 = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
_MAMBA2_LAYERS = ["linear_attention", "full_attention", "linear_attention"]
_GRANITE4 = {
    "num_hidden_layers": 3,
    "layer_types": _MAMBA2_LAYERS,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 48,
    "shared_intermediate_size": 80,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
}
_NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
    "time_step_min": 1e-9,  # the library limits steps by it in prompts, not in decodes
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 80,
    "moe_latent_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
# Models with other recurrent layers than gated delta nets.
MIXERS: dict[str, dict[str, Any]] = {
    "lfm2": _LFM2,
    "granitemoehybrid": _GRANITE4,
    "nemotron_h": _NEMOTRON_H,
    "lfm2_moe": _LFM2 | _EXPERTS | {"num_dense_layers": 1, "routed_scaling_factor": 1.5},
}

# Models whose recurrent layers the library computes.
ADAPTED_MIXERS: dict[str, dict[str, Any]] = {
    "bamba": {  # the library counts its positions from 0 in each call, unless they are given
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 12,
    },
    "falcon_h1": {
        "mamba_d_ssm": 128,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 12,
        "mamba_chunk_size": 16,
        "lm_head_multiplier": 0.5,
    },
    "jamba": {
        "num_hidden_layers": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
    "olmo_hybrid": {
        "num_hidden_layers": 3,
        "layer_types": _MAMBA2_LAYERS,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 16,
    },
}

# Sizes of models with latent attention.
LATENT: dict[str, Any] = {
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "kv_lora_rank": 40,
    "q_lora_rank": 24,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}


def make_tiny_model(
    folder: Path,
    architecture: str = "llama",
    seed: int = 0,
    max_shard_size: str = "50GB",
    auto_class: str = "AutoModelForCausalLM",
    **overrides: Any,
) -> Path:
    """Write config, random float32 safetensors, generation config and tokenizer to `folder`; returns it.

    `auto_class` of `transformers` makes the model.

    `overrides` are fields of the architecture's `transformers` config class (`tie_word_embeddings`, `rope_scaling`, …).
    The weights are large enough (standard deviation 0.1) for greedy decoding to depend on the whole prompt.
    """
    import transformers
    from transformers import AutoConfig, GenerationConfig

    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": None,
    }
    if architecture == "mistral":
        settings["sliding_window"] = 24
    if architecture in RECURRENT:
        settings |= {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        }
    settings |= MIXTURES.get(architecture, {}) | MIXERS.get(architecture, {})
    settings |= ADAPTED_MIXERS.get(architecture, {})
    settings.update(overrides)
    config = AutoConfig.for_model(architecture, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, auto_class).from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():  # biases and norms start as constants: make them matter
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter.data += 0.1 * torch.randn(parameter.shape)
        for name, buffer in model.named_buffers():
            if name.endswith("bias"):
                buffer += 0.1 * torch.randn(buffer.shape)
    if auto_class == "AutoModelForCausalLM":
        model.generation_config = GenerationConfig(eos_token_id=[EOS_TOKEN_ID])
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    return folder


def as_text_part(
    text: Path, folder: Path, architecture: str, names: tuple[str, str] = ("model.", "model.language_model.")
) -> Path:
    """Write the model in `text` to `folder` as the text model of a checkpoint with other inputs; returns the folder.

    `names`: the beginning of its tensors' names, and what stands there in the larger checkpoint.
    """
    folder.mkdir()
    for path in text.glob("*.json"):
        shutil.copy(path, folder)
    tensors = load_file(text / "model.safetensors")
    renamed = {name.replace(*names, 1): tensor for name, tensor in tensors.items()}
    save_file(renamed | {"vision_tower.weight": torch.zeros(3)}, folder / "model.safetensors")
    fields = json.loads((text / "config.json").read_text())
    config = {"architectures": [architecture], "model_type": fields["model_type"], "text_config": fields}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges (token id = byte value), three special tokens and a chat template."""
    byte_tokens = byte_alphabet()
    tokenizer = Tokenizer(BPE(vocab={token: byte for byte, token in enumerate(byte_tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "chat_template": CHAT_TEMPLATE,
                "model_max_length": 512,
            }
        )
    )


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE, in byte order (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(BYTES, 2 * BYTES))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(BYTES)]
