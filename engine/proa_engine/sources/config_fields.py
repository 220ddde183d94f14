"""Checks of the fields of config.json that several architectures share, by their names. A value that passes can still
be one that an architecture does not support. Does not import torch, which takes seconds.

Raises ValueError, naming the field.
"""

import math
import reprlib
from collections.abc import Mapping
from typing import Any

MAX_LAYERS = 10_000  # of which objects are made before the weights are compared with their number
_MAX_SIZE = 2**31 - 1
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "kv_channels",
    "ffn_hidden_size",
    "max_position_embeddings",
)
# Models without such a part may say that it has a size of 0: of experts, or beside them.
_SIZES_OF_PARTS = (
    "intermediate_size",
    "moe_intermediate_size",
    "multi_query_group_num",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts",
    "num_experts_per_tok",
    "num_local_experts",
    "num_nextn_predict_layers",
    "shared_expert_intermediate_size",
    "sliding_window",
)
_OF_ALL_LAYERS = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")
_OBJECTS = (
    "text_config",
    "vision_config",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
    "dflash_config",
    "dspark_config",
    "speculators_config",
)
_ABOVE_ZERO = (
    "attention_multiplier",
    "attn_logit_softcapping",
    "embedding_multiplier",
    "final_logit_softcapping",
    "logits_scaling",
    "partial_rotary_factor",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "rope_local_base_freq",
    "rope_ratio",
    "rope_theta",
    "routed_scaling_factor",
)
_NOT_NEGATIVE = ("layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "rms_norm_eps")
# Of `rope_parameters` and `rope_scaling`, or of each layer type in them.
_ROPE = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "high_freq_factor",
    "long_factor",
    "low_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "short_factor",
)


def check_fields(fields: Any) -> None:
    """`fields`: of a whole config.json, or of its text model."""
    if not isinstance(fields, dict):
        raise ValueError(f"text_config in config.json must be an object, got {reprlib.repr(fields)}")
    for name in _OBJECTS:
        if not isinstance(fields.get(name), dict | None):
            raise ValueError(f"{name} in config.json must be an object, got {reprlib.repr(fields[name])}")
    for name in (*_SIZES, *_SIZES_OF_PARTS):
        _check_size(name, fields.get(name), least=0 if name in _SIZES_OF_PARTS else 1)
    num_layers = fields.get("num_hidden_layers")
    if isinstance(num_layers, int) and num_layers > MAX_LAYERS:
        raise ValueError(f"num_hidden_layers in config.json is {num_layers}; supported: at most {MAX_LAYERS}")
    for name in (*_ABOVE_ZERO, *_NOT_NEGATIVE):
        _check_number(name, fields.get(name), may_be_zero=name in _NOT_NEGATIVE)
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    for part in (rope, *(each for each in rope.values() if isinstance(each, dict))):
        for name in _ROPE:
            _check_number(name, part.get(name), may_be_zero=False)
    check_eos(fields, "config.json")


def check_eos(fields: Mapping[str, Any], file: str) -> None:
    """Raise ValueError unless `eos_token_id` is a token id, a list of them, or absent."""
    eos = fields.get("eos_token_id")
    if not all(type(each) is int for each in (eos if isinstance(eos, list) else [eos]) if each is not None):
        raise ValueError(f"eos_token_id in {file} must be a token id or a list of them, got {reprlib.repr(eos)}")


def _check_size(name: str, value: object, *, least: int) -> None:
    sizes = value if isinstance(value, list) and name not in _OF_ALL_LAYERS else [value]  # a list: by layer
    for size in sizes:
        if size is not None and (type(size) is not int or not least <= size <= _MAX_SIZE):
            bound = "above zero" if least else "of at least zero"
            raise ValueError(f"{name} in config.json must be a whole number {bound}, got {reprlib.repr(size)}")


def _check_number(name: str, value: object, *, may_be_zero: bool) -> None:
    for number in value if isinstance(value, list) else [value]:  # a list: by layer, or by dimension
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"{name} in config.json must be a number, got {reprlib.repr(number)}")
        if not math.isfinite(number) or number < 0 or (number == 0 and not may_be_zero):
            bound = "of at least zero" if may_be_zero else "above zero"
            raise ValueError(f"{name} in config.json must be a finite number {bound}, got {reprlib.repr(number)}")
