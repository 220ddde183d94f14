"""ModelConfig: an architecture's parameters from config.json, checked and with defaults filled in.

Raises ValueError, naming the field, for what the engine does not support, before any weight is read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from proa_engine.kernels.moe_route import Routing
from proa_engine.layers.rotary import RopeConfig
from proa_engine.layers.weights import LinearMethod
from proa_engine.models.quantization import linear_method
from proa_engine.models.registry import MODULES

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Parameters of a mixture of experts."""

    num_experts: int
    intermediate_size: int  # of each expert
    routing: Routing
    layers: tuple[int, ...]  # layers with experts; the others have a plain MLP


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Parameters of a model. Sizes are full sizes, before sharding."""

    architecture: str
    model_type: str  # empty: config.json names none
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    moe: MoEConfig | None
    sliding_window: int | None  # window of the layers that have one, tokens
    layer_windows: tuple[int | None, ...]  # window of each layer; None: full attention
    eos_token_ids: tuple[int, ...]
    torch_dtype: torch.dtype  # type of the unquantized weights on disk
    linear_method: LinearMethod  # how matrices are stored and multiplied
    batch_invariant: bool = False  # for attention and logits on a GPU; `linear_method` has its own flag

    @classmethod
    def from_folder(cls, folder: Path | str, quantization: str | None = None) -> "ModelConfig":
        """Read `folder`/config.json, and the end tokens from generation_config.json. `quantization` is the user's
        option.

        Raises ValueError, naming what is not supported, or FileNotFoundError.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} is not a model folder: it has no config.json")
        generation_path = Path(folder) / "generation_config.json"
        generation = json.loads(generation_path.read_text()) if generation_path.is_file() else {}
        return cls.from_dicts(json.loads(path.read_text()), generation, quantization)

    @classmethod
    def from_dicts(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any], quantization: str | None = None
    ) -> "ModelConfig":
        architecture = _architecture(config)
        num_heads, num_layers = config["num_attention_heads"], config["num_hidden_layers"]
        windows = _layer_windows(config, architecture, num_layers)
        max_positions = config.get("max_position_embeddings", 2048)
        return cls(
            architecture=architecture,
            model_type=config.get("model_type") or "",
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope=_rope(config, max_positions),
            max_position_embeddings=max_positions,
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            attention_bias=config.get("attention_bias", False),
            mlp_bias=config.get("mlp_bias", False),
            moe=_moe(config, architecture, num_layers),
            sliding_window=next((window for window in windows if window is not None), None),
            layer_windows=windows,
            eos_token_ids=_eos_token_ids(config, generation),
            torch_dtype=_torch_dtype(config),
            linear_method=linear_method(config.get("quantization_config"), quantization),
        )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or ["none named"]
    if names[0] not in MODULES:
        raise ValueError(f"architecture {names[0]} is not supported; supported: {', '.join(MODULES)}")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"activation {activation} is not supported; supported: silu")
    return str(names[0])


def _rope(config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Read `rope_parameters`, or the older fields `rope_theta` and `rope_scaling`."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = given.get("rope_type", given.get("type", "default"))
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise ValueError(f"rope scaling {rope_type} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}")
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor {partial} is not supported; supported: 1.0")
    known = {name: given[name] for name in RopeConfig.__slots__ if given.get(name) is not None and name != "type"}
    known.setdefault("original_max_position_embeddings", max_positions)
    theta = given.get("rope_theta", config.get("rope_theta", 10_000.0))
    return RopeConfig(theta=theta, type=rope_type, **known)


def _layer_windows(config: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if not config.get("use_sliding_window", False) or not architecture.startswith("Qwen"):
        return (None,) * num_layers
    types = config.get("layer_types") or [
        "sliding_attention" if layer >= config.get("max_window_layers", 28) else "full_attention"
        for layer in range(num_layers)
    ]
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown:
        raise ValueError(f"layer type {sorted(unknown)[0]} is not supported; supported: full and sliding attention")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in types)


def _moe(config: Mapping[str, Any], architecture: str, num_layers: int) -> MoEConfig | None:
    if architecture != "Qwen3MoeForCausalLM":
        return None
    step, plain = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    return MoEConfig(
        # `num_experts` is the older name, `num_local_experts` that of transformers 5.
        num_experts=config["num_experts"] if "num_experts" in config else config["num_local_experts"],
        intermediate_size=config["moe_intermediate_size"],
        routing=Routing(config["num_experts_per_tok"], normalize=config.get("norm_topk_prob", False)),
        layers=tuple(layer for layer in range(num_layers) if layer not in plain and (layer + 1) % step == 0),
    )


def _eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def _torch_dtype(config: Mapping[str, Any]) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in TORCH_DTYPES:
        raise ValueError(f"dtype {name} is not supported; supported: {', '.join(TORCH_DTYPES)}")
    return TORCH_DTYPES[name]
