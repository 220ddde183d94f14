"""The network's weights by the names of Hugging Face's `LlamaForCausalLM`, and back."""

from collections.abc import Mapping

import torch
from torch import Tensor

from training.network import NetworkConfig

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
