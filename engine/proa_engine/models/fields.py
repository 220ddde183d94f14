"""Read layers' options from the fields of config.json, by the names that most architectures share.

Raises ValueError, naming the field, for what is not supported.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from proa_engine.kernels.silu_and_mul import ActivationName
from proa_engine.layers.attention import AttentionOptions
from proa_engine.layers.mlp import GatedMLPOptions
from proa_engine.layers.norm import NormOptions
from proa_engine.layers.rotary import RopeConfig

Fields = Mapping[str, Any]

ACTIVATIONS: Mapping[str, ActivationName] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
LAYER_TYPES = ("full_attention", "sliding_attention")
MIXER_TYPES = ("linear_attention", "full_attention")
_OLDER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
# `mrope` has sections. `dynamic` changes frequencies behind the context, which no sequence here exceeds.
_OLDER_ROPE_TYPES = {"su": "longrope", "mrope": "default", "dynamic": "default"}
ROPE_TYPES = ("default", "linear", "llama3", "longrope", "proportional", "yarn")
SCALING_FIELDS = (
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "llama_4_scaling_beta",
)


def require(fields: Fields, name: str, supported: Sequence[object]) -> None:
    """Refuse another value of the field `name`. A field that is missing or null is not refused."""
    value = fields.get(name)
    if value is not None and value not in supported:
        known = ", ".join(map(str, supported)) or "none"
        raise ValueError(f"{name} {value} is not supported; supported: {known}")


def renamed(fields: Fields, names: Mapping[str, str]) -> dict[str, Any]:
    """`fields` and those of other names that they have, by the names that most architectures share. `names`: the name
    of each in `fields`."""
    return {**fields, **{name: fields[stored] for name, stored in names.items() if stored in fields}}


def norm(fields: Fields, offset: float = 0.0) -> NormOptions:
    return NormOptions(fields.get("rms_norm_eps", 1e-6), offset)


def head_dim(fields: Fields) -> int:
    return int(fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"])


def attention(fields: Fields, **options: Any) -> AttentionOptions:
    """The sizes, the biases and the rotation, and `options` of `AttentionOptions`, which replace them."""
    num_heads, bias = fields["num_attention_heads"], fields.get("attention_bias", False)
    read = {
        "num_heads": num_heads,
        "num_kv_heads": fields.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim(fields),
        "qkv_bias": bias,
        "output_bias": bias,
    }
    if "rope" not in options:
        read["rope"] = rope(fields)
    return AttentionOptions(**(read | options))


def gated_mlp(fields: Fields, **options: Any) -> GatedMLPOptions:
    """The size and the biases, and `options` of `GatedMLPOptions`, which replace them."""
    activation = fields.get("hidden_activation") or fields.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation} is not supported; supported: {', '.join(ACTIVATIONS)}")
    read = {"bias": fields.get("mlp_bias", False), "activation": ACTIVATIONS[activation]}
    if "inner_size" not in options:
        read["inner_size"] = fields["intermediate_size"]
    return GatedMLPOptions(**(read | options))


def rope(
    fields: Fields, given: Fields | None = None, *, interleaved: bool = False, partial: bool = False
) -> RopeConfig:
    """Read `given`, by default the field `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

    `interleaved` as in `RopeConfig`. `partial`: the share `partial_rotary_factor` of each head is rotated; other
    architectures rotate whole heads whatever it is, as `transformers` does.
    """
    if given is None:
        given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    rope_type: Any = given.get("rope_type", given.get("type", "default"))
    rope_type = _OLDER_ROPE_TYPES.get(rope_type, rope_type)
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope scaling {rope_type} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if rope_type == "proportional":
        return RopeConfig(
            dim=head_dim(fields),
            theta=given["rope_theta"],
            type=rope_type,
            factor=given.get("factor", 1.0),
            proportion=given.get("partial_rotary_factor", 1.0),
        )
    share = given.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    if not partial and share != 1.0:
        if rope_type != "default":  # transformers cannot run it
            raise ValueError(f"partial_rotary_factor {share} is not supported with rope scaling {rope_type}")
        share = 1.0
    known = {name: given[name] for name in SCALING_FIELDS if given.get(name) is not None}
    max_positions = fields.get("max_position_embeddings", 2048)
    if fields.get("original_max_position_embeddings"):
        known["original_max_position_embeddings"] = fields["original_max_position_embeddings"]
    known.setdefault("original_max_position_embeddings", max_positions)
    if rope_type == "longrope":
        known |= {name: tuple(given[name]) for name in ("short_factor", "long_factor")}
        known.setdefault("factor", max_positions / known["original_max_position_embeddings"])
    theta = given.get("rope_theta") or fields.get("rope_theta") or 10_000.0
    dim = int(head_dim(fields) * share)
    take_turns = fields.get("mrope_interleaved", True)
    require(given, "mrope_interleaved", (take_turns,))
    sections = tuple(given.get("mrope_section") or fields.get("mrope_section") or ())
    if not take_turns and sum(sections) != dim // 2:
        raise ValueError(f"mrope_section {list(sections)} is not supported: its sum must be {dim // 2}")
    return RopeConfig(
        dim=dim,
        interleaved=interleaved,
        theta=theta,
        type=rope_type,
        sections=sections,
        sections_take_turns=take_turns,
        **known,
    )


def ropes(fields: Fields, sliding_theta: float) -> dict[str, RopeConfig]:
    """The rotation of each layer type. In the older fields, only that of full attention is scaled."""
    given = fields.get("rope_parameters") or {}
    if "full_attention" in given:
        return {kind: rope(fields, given[kind]) for kind in LAYER_TYPES}
    return {"full_attention": rope(fields), "sliding_attention": rope(fields, {"rope_theta": sliding_theta})}


def layer_types(fields: Fields, default: Sequence[str]) -> tuple[str, ...]:
    """`full_attention` or `sliding_attention` for each layer. `default`: where the field is missing."""
    types = tuple(fields.get("layer_types") or default)
    check_layer_types(types, LAYER_TYPES)
    return types


def check_layer_types(types: Sequence[str], supported: Sequence[str]) -> None:
    """Raise ValueError, naming it, if one of the layers' `types` is not `supported`."""
    for kind in types:
        if kind not in supported:
            raise ValueError(f"layer type {kind} is not supported; supported: {', '.join(supported)}")


def mixer_types(types: Sequence[str]) -> list[str]:
    """The types of layers by their present names."""
    return [_OLDER_TYPES.get(kind, kind) for kind in types]


def step_limit(fields: Fields) -> tuple[float, float]:
    """The least and the greatest time step of Mamba2. `time_step_min` is not a limit: it is for drawing weights.

    Infinity is stored as JSON's extension, as a string, or as `transformers` 5 does.
    """
    least, greatest = fields.get("time_step_limit") or (0.0, math.inf)
    if isinstance(greatest, Mapping):
        greatest = greatest["__float__"]
    return float(least), float(greatest)


def kind(is_sliding: bool) -> str:
    return "sliding_attention" if is_sliding else "full_attention"


def every(period: int, fields: Fields) -> list[str]:
    """Full attention in the last of every `period` layers, a window in the others."""
    return [kind((layer + 1) % period != 0) for layer in range(fields["num_hidden_layers"])]


def windows(fields: Fields, types: Sequence[str]) -> tuple[int | None, ...]:
    return tuple(fields["sliding_window"] if each == "sliding_attention" else None for each in types)
