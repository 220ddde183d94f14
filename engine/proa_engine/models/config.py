"""ModelConfig: a model's parameters from config.json, checked and with defaults filled in.

Raises ValueError, naming the field, for what the engine does not support, before any weight is read. What depends on
the architecture is read by its class (`registry`), most of it with the functions of `fields`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from proa_engine.layers.cache_layers import StateLayer
from proa_engine.layers.norm import NormOptions
from proa_engine.layers.weights import LinearMethod
from proa_engine.models.decoder_layer import LayerDeclaration
from proa_engine.models.quantization import linear_method
from proa_engine.models.registry import architecture_of, is_adapted, model_class, standard_fields

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderOptions:
    """An architecture's layers, and what is around them."""

    layers: tuple[LayerDeclaration, ...]
    norm: NormOptions  # of the last layer's output
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None  # c: logits become c * tanh(logits / c)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Parameters of a model. Sizes are full sizes, before sharding."""

    architecture: str
    model_type: str  # empty: config.json names none
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    decoder: DecoderOptions
    eos_token_ids: tuple[int, ...]
    torch_dtype: torch.dtype  # type of the unquantized weights on disk
    linear_method: LinearMethod  # how matrices are stored and multiplied
    num_nextn_layers: int = 0  # layers behind the last one that predict further tokens; they are not loaded
    is_text_part: bool = False  # the checkpoint also holds models of other inputs, which are not loaded
    batch_invariant: bool = False  # for attention and logits on a GPU; `linear_method` has its own flag

    @property
    def layers(self) -> tuple[LayerDeclaration, ...]:
        return self.decoder.layers

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer keeps a state, which cannot forget a token."""
        return any(layer.cache_kind is StateLayer for layer in self.layers)

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
        architecture = architecture_of(config)
        model = model_class(architecture)
        fields = {**model.defaults, **_text_fields(config)}
        if is_adapted(architecture):
            fields = standard_fields(fields)
        return cls(
            architecture=architecture,
            model_type=config.get("model_type") or "",
            vocab_size=fields["vocab_size"],
            hidden_size=fields["hidden_size"],
            max_position_embeddings=fields.get("max_position_embeddings", 2048),
            tie_word_embeddings=fields.get("tie_word_embeddings", False),
            decoder=model.read_options(fields),
            eos_token_ids=_eos_token_ids(fields, generation),
            torch_dtype=_torch_dtype(fields),
            is_text_part="text_config" in config,
            num_nextn_layers=fields.get("num_nextn_predict_layers") or 0,
            linear_method=linear_method(fields.get("quantization_config"), quantization),
        )


def _text_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the text model, which are in `text_config` if the model has other inputs too."""
    text = config.get("text_config") or {}
    return {**config, **{name: value for name, value in text.items() if value is not None}}


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
