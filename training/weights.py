"""The network's weights by the names of Hugging Face's `LlamaForCausalLM`, and back."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from training.network import Network, NetworkConfig

_MERGED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
}
_PLAIN = {
    "attention_norm": "input_layernorm",
    "out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "down": "mlp.down_proj",
}
_OUTER = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}


def to_huggingface(config: NetworkConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in bfloat16, with the merged projections split."""
    tensors = {theirs: weights[ours] for ours, theirs in _OUTER.items()}
    kv_size = config.num_kv_heads * config.head_dim
    sizes = {"qkv": [config.hidden_size, kv_size, kv_size], "gate_up": [config.intermediate_size] * 2}
    for layer in range(config.num_layers):
        block, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        for merged, parts in _MERGED.items():
            split = weights[f"{block}.{merged}.weight"].split(sizes[merged])
            tensors |= {f"{theirs}.{part}.weight": tensor for part, tensor in zip(parts, split, strict=True)}
        tensors |= {f"{theirs}.{name}.weight": weights[f"{block}.{ours}.weight"] for ours, name in _PLAIN.items()}
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def from_huggingface(config: NetworkConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The network's weights in float32, with the projections merged."""
    weights = {ours: tensors[theirs] for ours, theirs in _OUTER.items()}
    for layer in range(config.num_layers):
        block, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        for merged, parts in _MERGED.items():
            weights[f"{block}.{merged}.weight"] = torch.cat([tensors[f"{theirs}.{part}.weight"] for part in parts])
        weights |= {f"{block}.{ours}.weight": tensors[f"{theirs}.{name}.weight"] for ours, name in _PLAIN.items()}
    return {name: tensor.float() for name, tensor in weights.items()}


def load_network(folder: Path) -> Network:
    """The Llama in a model directory, whose output head is its embedding."""
    fields = json.loads((folder / "config.json").read_text())
    config = NetworkConfig(
        vocab_size=fields["vocab_size"],
        hidden_size=fields["hidden_size"],
        num_layers=fields["num_hidden_layers"],
        num_heads=fields["num_attention_heads"],
        num_kv_heads=fields["num_key_value_heads"],
        intermediate_size=fields["intermediate_size"],
        rope_theta=fields.get("rope_parameters", fields)["rope_theta"],
        rms_norm_eps=fields["rms_norm_eps"],
        max_position_embeddings=fields["max_position_embeddings"],
    )
    network = Network(config)
    network.load_state_dict(from_huggingface(config, load_file(folder / "model.safetensors")))
    return network
