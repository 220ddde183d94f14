"""Which architectures the adapter runs, and their configuration as `transformers` reads it.

Raises ValueError, naming the field, for what is not supported, before any weight is read.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from proa_engine.layers.cache_layers import KeyValueLayer
from proa_engine.layers.expert_split import ExpertSizes
from proa_engine.layers.norm import NormOptions
from proa_engine.layers.parallel import LayerContext
from proa_engine.layers.weights import Weights
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder_layer import FeedForward, Layer
from proa_engine.observability.library_logs import use_our_handlers

UNSUPPORTED_ROPE_TYPES = ("dynamic", "longrope")  # frequencies depend on the longest sequence of the batch
LAYER_TYPES = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "linear_attention",  # with states of their own (`recurrent`), as are the next three
    "conv",
    "hybrid",
    "mamba",
    "mlp",  # without a mixer, as is the next one
    "moe",
}
# The library replaces methods of its classes, and the process's default type, while it builds a model.
_BUILDING = Lock()


def read_config(fields: Mapping[str, Any]) -> PreTrainedConfig:
    """config.json's fields as `transformers` reads them."""
    if "text_config" in fields:
        raise ValueError(f"model_type {fields.get('model_type')} is not supported: it has other inputs than text")
    if fields.get("model_type") not in CONFIG_MAPPING:
        raise ValueError(f"model_type {fields.get('model_type')} is not one of transformers")
    with _explain_errors(f"a configuration of {fields['model_type']}"):
        config = CONFIG_MAPPING[fields["model_type"]].from_dict(dict(fields))
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise ValueError("is_encoder_decoder and add_cross_attention are not supported")
    unknown = set(_field(config, "layer_types") or ()) - LAYER_TYPES
    if unknown:
        raise ValueError(f"layer type {sorted(unknown)[0]} is not supported through transformers")
    given = getattr(config, "rope_parameters", None) or {}
    for rope in (given, *given.values()):
        if isinstance(rope, Mapping) and rope.get("rope_type") in UNSUPPORTED_ROPE_TYPES:
            raise ValueError(f"rope_type {rope['rope_type']} is not supported through transformers")
    return config


@contextmanager
def _explain_errors(wanted: str) -> Iterator[None]:
    """Turn an error of the library into a ValueError: it raises any type for fields that it cannot use."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"transformers cannot make {wanted} of config.json: {reason}") from error


def standard_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that `ModelConfig` reads, which some architectures call by other names, and "original": `fields`."""
    config = read_config(fields)
    longest = _field(config, "max_position_embeddings") or 2048
    # Chunked attention sees all tokens before, as long as there is one chunk.
    longest = min(longest, _field(config, "attention_chunk_size") or longest)
    return {
        **fields,
        "original": fields,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "max_position_embeddings": longest,
        "tie_word_embeddings": getattr(config, "tie_word_embeddings", False),
        "eos_token_id": getattr(config, "eos_token_id", None),
    }


def _field(config: PreTrainedConfig, name: str) -> Any:
    """The field that the library calls `name`, None if the architecture has none."""
    return vars(config).get(config.attribute_map.get(name, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedOptions(DecoderOptions):
    fields: Mapping[str, Any]  # of config.json


@dataclass(frozen=True, slots=True)
class AdaptedMLP:
    """What is known of a layer's feed-forward layer. `transformers` makes it."""

    inner_size: int

    @property
    def routed_experts(self) -> ExpertSizes | None:
        return None

    def num_parameters(self, hidden_size: int) -> int:
        return 0  # counted with the layer

    def num_multiplied(self, hidden_size: int) -> int:
        return 3 * hidden_size * self.inner_size

    def make(self, weights: Weights, context: LayerContext) -> FeedForward:
        raise AssertionError("transformers makes the layers")


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    number: int
    size: int  # parameters
    mlp: AdaptedMLP

    @property
    def routed_experts(self) -> ExpertSizes | None:
        return None

    @property
    def cache_kinds(self) -> tuple[type[KeyValueLayer], ...]:
        return (KeyValueLayer,)

    def num_parameters(self, hidden_size: int) -> int:
        return self.size

    def num_copied(self, hidden_size: int, num_ranks: int) -> int:
        return 0  # not known

    def make(self, weights: Weights, context: LayerContext) -> Layer:
        raise AssertionError("transformers makes the layers")


def read_options(fields: Mapping[str, Any]) -> AdaptedOptions:
    """The options of a model of `transformers`, which is built without memory to count its parameters. `fields` are
    those of `standard_fields`."""
    fields = fields["original"]
    config = read_config(fields)
    model = build_on_meta(fields, torch.float32)
    embeddings = {id(each.weight) for each in (model.get_input_embeddings(), model.get_output_embeddings()) if each}
    size = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in embeddings)
    mlp = AdaptedMLP(_field(config, "intermediate_size") or 4 * config.hidden_size)
    layers = config.num_hidden_layers
    return AdaptedOptions(
        layers=tuple(AdaptedLayer(number, size // layers, mlp) for number in range(layers)),
        norm=NormOptions(1e-6),
        needs_token_ids="transformers runs it",
        fields=dict(fields),
    )


def build_on_meta(fields: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """The model of `transformers`, without memory for its tensors. From any thread."""
    import transformers
    from transformers.utils.generic import ContextManagers

    use_our_handlers("transformers")
    config = read_config(fields)
    config._attn_implementation = "eager"
    model_class = getattr(transformers, fields["architectures"][0])
    context = ContextManagers(model_class.get_init_context(dtype, False, False, False))
    with _explain_errors(model_class.__name__), _BUILDING, context:
        model = model_class(config)
    return model.eval()
