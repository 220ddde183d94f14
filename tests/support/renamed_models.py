"""Tiny models with the names of fields and tensors that checkpoints of other code have, and the same models as
`transformers` stores them."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from support.tiny_models import make_tiny_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """How checkpoints of an architecture store a model of the library's `model_type`."""

    model_type: str = "llama"
    overrides: Mapping[str, Any] = field(default_factory=dict)  # of the library's configuration
    fields: Mapping[str, str] = field(default_factory=dict)  # the library's name of a field -> the name in config.json
    added: Mapping[str, Any] = field(default_factory=dict)  # fields that the library does not have
    tensors: Mapping[str, str] = field(default_factory=dict)  # a part of the library's names -> that of the checkpoint
    qkv: Literal["alone", "one after the other", "by groups"] = "alone"
    normalizes_head: bool = False  # its code divides each row of the LM head by its length


MERGED: Literal["one after the other"] = "one after the other"
ROPE = {"rope_type": "default", "rope_theta": 5e4}
BAICHUAN: dict[str, Any] = {"overrides": {"num_key_value_heads": 4}, "tensors": {"qkv_proj": "W_pack"}, "qkv": MERGED}
STORED: dict[str, Stored] = {
    "BaiChuanForCausalLM": Stored(**BAICHUAN),
    "BaichuanForCausalLM": Stored(**BAICHUAN, normalizes_head=True),
    "ChatGLMForConditionalGeneration": Stored(
        model_type="glm",
        overrides={"attention_bias": True, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
        fields={
            "attention_bias": "add_qkv_bias",
            "head_dim": "kv_channels",
            "intermediate_size": "ffn_hidden_size",
            "max_position_embeddings": "seq_length",
            "num_hidden_layers": "num_layers",
            "num_key_value_heads": "multi_query_group_num",
            "rms_norm_eps": "layernorm_epsilon",
        },
        added={
            "add_bias_linear": False,
            "multi_query_attention": True,
            "original_rope": True,
            "post_layer_norm": True,
            "rmsnorm": True,
            "rope_ratio": 5,
        },
        tensors={
            "model.embed_tokens": "transformer.embedding.word_embeddings",
            "model.layers": "transformer.encoder.layers",
            "model.norm": "transformer.encoder.final_layernorm",
            "lm_head": "transformer.output_layer",
            "self_attn": "self_attention",
            "qkv_proj": "query_key_value",
            "o_proj": "dense",
            "gate_up_proj": "dense_h_to_4h",
            "down_proj": "dense_4h_to_h",
        },
        qkv="one after the other",
    ),
    "ExaoneForCausalLM": Stored(
        fields={
            "hidden_act": "activation_function",
            "num_hidden_layers": "num_layers",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        tensors={
            "model.embed_tokens": "transformer.wte",
            "model.layers": "transformer.h",
            "model.norm": "transformer.ln_f",
            "self_attn": "attn.attention",
            "o_proj": "out_proj",
            "gate_proj": "c_fc_0",
            "up_proj": "c_fc_1",
            "down_proj": "c_proj",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
        },
    ),
    "InternLM2ForCausalLM": Stored(
        added={"bias": False, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        tensors={
            "embed_tokens": "tok_embeddings",
            "lm_head": "output",
            "self_attn": "attention",
            "qkv_proj": "wqkv",
            "o_proj": "wo",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
        },
        qkv="by groups",
    ),
    "OrionForCausalLM": Stored(
        model_type="stablelm",
        overrides={"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}},
        fields={"layer_norm_eps": "rms_norm_eps"},
    ),
}
FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "max_position_embeddings", "hidden_act", "rms_norm_eps", "layer_norm_eps"),
    *("attention_bias", "tie_word_embeddings", "eos_token_id", "dtype"),
)


def make_renamed_model(root: Path, architecture: str, seed: int = 3) -> tuple[Path, Path]:
    """Write a model to two folders under `root`, and return them: as checkpoints of `architecture` are stored, and as
    the library stores it."""
    stored = STORED[architecture]
    theirs = make_tiny_model(root / "theirs", stored.model_type, seed, **stored.overrides)
    tensors, path = load_file(theirs / "model.safetensors"), theirs / "model.safetensors"
    if stored.normalizes_head:
        normalized = F.normalize(tensors["lm_head.weight"])
        save_file(tensors | {"lm_head.weight": normalized}, path, {"format": "pt"})
    ours = root / architecture
    ours.mkdir()
    for each in theirs.glob("*.json"):
        shutil.copy(each, ours)
    (ours / "config.json").write_text(json.dumps(_config(theirs, architecture)))
    save_file({_name(name, stored): each for name, each in _merged(tensors, stored.qkv).items()}, ours / path.name)
    return ours, theirs


def _config(theirs: Path, architecture: str) -> dict[str, Any]:
    stored, fields = STORED[architecture], json.loads((theirs / "config.json").read_text())
    known = {stored.fields.get(name, name): fields[name] for name in FIELDS if name in fields}
    theta = fields["rope_parameters"]["rope_theta"]
    config = {"architectures": [architecture], "model_type": "of another library", "rope_theta": theta}
    return {**config, **known, **stored.added}


def _name(name: str, stored: Stored) -> str:
    for part, other in stored.tensors.items():
        name = name.replace(part, other)
    return name


def _merged(tensors: Mapping[str, torch.Tensor], qkv: str) -> dict[str, torch.Tensor]:
    """`tensors` with one matrix, and one bias, for q, k and v of each layer."""
    merged = dict(tensors)
    for name in tensors if qkv != "alone" else ():
        if ".q_proj." in name:
            parts = [merged.pop(name.replace(".q_proj.", f".{one}_proj.")) for one in "qkv"]
            if qkv == "by groups":
                size, num_kv_heads = 16, len(parts[1]) // 16
                grouped = [part.unflatten(0, (num_kv_heads, -1, size)) for part in parts]
                parts = [torch.cat(grouped, dim=1).flatten(0, 2)]
            merged[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat(parts)
    return merged
