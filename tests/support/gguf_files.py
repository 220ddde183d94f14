"""GGUF files of tiny Hugging Face folders, written as llama.cpp's converter does it, by the package `gguf`."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "lfm2": gguf.MODEL_ARCH.LFM2,
}
Kinds = Callable[[str], gguf.GGMLQuantizationType]
F32 = gguf.GGMLQuantizationType.F32


def write_gguf(
    folder: Path, path: Path, kind_of: Kinds = lambda name: F32, *, rope_freqs: list[float] | None = None
) -> Path:
    """Write the model in `folder` to `path`; returns it. `kind_of`: the type of a tensor of two dimensions, by GGUF's
    name. `rope_freqs`: by which the frequencies of the rotation are divided."""
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(str(path), gguf.MODEL_ARCH_NAMES[architecture])
    _add_sizes(writer, config)
    _add_tokenizer(writer, folder)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, values in _converted(load_file(folder / "model.safetensors"), config).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        kind = kind_of(stored) if values.ndim > 1 else F32
        writer.add_tensor(stored, gguf.quants.quantize(values, kind), raw_dtype=kind)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_freqs, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if config["model_type"] == "lfm2":
        heads = {"conv": 0, "full_attention": config["num_key_value_heads"]}
        writer.add_head_count_kv([heads[kind] for kind in config["layer_types"]])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if _num_experts(config):
        writer.add_expert_count(_num_experts(config))
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if config["model_type"] != "mixtral":
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["model_type"] == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])


def _num_experts(config: Mapping[str, Any]) -> int:
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """A byte-level tokenizer without merges, and the template. Its division makes no difference."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    added = tokenizer.get_added_tokens_decoder()
    ids = range(tokenizer.get_vocab_size())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokenizer.id_to_token(token_id) or "" for token_id in ids])
    writer.add_token_types([gguf.TokenType.CONTROL if token_id in added else gguf.TokenType.NORMAL for token_id in ids])
    writer.add_token_merges([])
    writer.add_eos_token_id(tokenizer.get_vocab()[config["eos_token"]])
    writer.add_chat_template(config["chat_template"])


def _converted(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    """By their names before; of experts one for all."""
    kind, converted = config["model_type"], {name: tensor.numpy() for name, tensor in tensors.items()}
    for name, values in converted.items():
        part = name.rpartition(".")[0].rpartition(".")[2]
        if kind in ("llama", "mixtral", "granite") and part in ("q_proj", "k_proj"):
            heads = config["num_attention_heads" if part == "q_proj" else "num_key_value_heads"]
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            converted[name] = halves.swapaxes(1, 2).reshape(values.shape)
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            converted[name] = values + 1
        if part == "conv":
            converted[name] = values.squeeze(1)
    for layer in range(config["num_hidden_layers"] if _num_experts(config) else 0):
        is_mixtral = kind == "mixtral"
        prefix = f"model.layers.{layer}.{'block_sparse_moe' if is_mixtral else 'mlp'}.experts"
        for part in ("w1", "w2", "w3") if is_mixtral else ("gate_proj", "up_proj", "down_proj"):
            experts = [converted.pop(f"{prefix}.{expert}.{part}.weight") for expert in range(_num_experts(config))]
            converted[f"{prefix}.{part}.weight"] = np.stack(experts)
    return converted
