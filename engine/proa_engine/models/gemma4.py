"""Gemma 4 (text): Gemma 3 whose full layers have heads of another size and may take values from the keys.

The last layers may read the caches of earlier ones. Of checkpoints with other inputs, only the text model is loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from proa_engine.kernels.moe_route import Routing
from proa_engine.layers.attention import AttentionOptions, QkNorm
from proa_engine.layers.attention_metadata import AttentionMetadata
from proa_engine.layers.attention_step import AttentionStep
from proa_engine.layers.cache_layers import CacheLayer, SharedLayer
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Weights
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions, ModelConfig
from proa_engine.models.decoder import DecoderForCausalLM, text_weights
from proa_engine.models.gemma4_layer import Gemma4ExpertsOptions, Gemma4Layer, Gemma4LayerOptions, Gemma4Step
from proa_engine.models.gemma4_per_layer import PerLayerInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Options(DecoderOptions):
    per_layer_size: int  # inputs that a token has for each layer; 0: none
    per_layer_vocab_size: int


class Gemma4ForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[read.Fields] = {
        "vocab_size": 262_144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        },
    }

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        read.require(fields, "use_bidirectional_attention", ("vision",))  # which changes nothing for text
        norm, mlp = read.norm(fields), read.gated_mlp(fields)
        wide = read.gated_mlp(fields, inner_size=2 * mlp.inner_size) if fields.get("use_double_wide_mlp") else mlp
        layers = [
            Gemma4LayerOptions(
                attention=attention,
                mlp=wide if attention.only_reads else mlp,
                norm=norm,
                experts=_experts(fields),
                per_layer_size=fields["hidden_size_per_layer_input"],
            )
            for attention in _attention(fields)
        ]
        return Gemma4Options(
            layers=tuple(layers),
            norm=norm,
            embedding_scale=fields["hidden_size"] ** 0.5,
            logits_soft_cap=fields.get("final_logit_softcapping"),
            per_layer_size=fields["hidden_size_per_layer_input"],
            per_layer_vocab_size=fields["vocab_size_per_layer_input"],
        )

    def __init__(self, config: ModelConfig, weights: Weights, parallel: ParallelContext) -> None:
        super().__init__(config, weights, parallel)
        self.per_layer_inputs: PerLayerInputs | None = None
        options = config.decoder
        assert isinstance(options, Gemma4Options)
        if options.per_layer_size:
            inner, _ = text_weights(weights)
            self.per_layer_inputs = PerLayerInputs(
                inner,
                config.hidden_size,
                len(options.layers),
                options.per_layer_size,
                options.per_layer_vocab_size,
                options.norm,
                parallel,
            )

    def begin(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> tuple[torch.Tensor, AttentionStep]:
        x, _ = super().begin(input_ids, positions, metadata)
        inputs = () if self.per_layer_inputs is None else self.per_layer_inputs(input_ids, x).unbind()
        return x, Gemma4Step(metadata, positions, self.batch_invariant, per_layer_inputs=iter(inputs))

    def cache_layers(self) -> tuple[CacheLayer, ...]:
        """A layer that only reads has the cache of the last one before that caches the same."""
        layers: list[CacheLayer] = []
        last: dict[CacheLayer, int] = {}
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Gemma4Layer)
            if layer.attention.only_reads:
                layers.append(SharedLayer(last[layer.cache_layer]))
            else:
                layers.append(layer.cache_layer)
                last[layer.cache_layer] = number
        return tuple(layers)


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """Gemma 4 with encoders of other inputs, which are not loaded."""


def _attention(fields: read.Fields) -> list[AttentionOptions]:
    """Of each layer."""
    num_layers = fields["num_hidden_layers"]
    types = [*read.layer_types(fields, read.every(6, fields))[:-1], "full_attention"]
    first_shared = num_layers - (fields.get("num_kv_shared_layers") or 0)
    norm, result = read.norm(fields), []
    for number, (kind, window) in enumerate(zip(types, read.windows(fields, types), strict=True)):
        layer = {**fields, **_overrides(fields, number, kind)}
        options = read.attention(
            layer,
            rope=read.rope(layer, fields["rope_parameters"][kind]),
            window=window,
            scale=1.0,
            qk_norm=QkNorm(norm),
            norm_values=True,
            values_are_keys=bool(fields.get("attention_k_eq_v")) and kind == "full_attention",
            only_reads=number >= first_shared,
        )
        result.append(options)
    return result


def _overrides(fields: read.Fields, number: int, kind: str) -> Mapping[str, Any]:
    """The fields in which a layer differs. transformers 5 writes them as `per_layer_config`."""
    stored: Mapping[str, Mapping[str, Any]] | None = fields.get("per_layer_config")
    if stored is not None:
        return stored.get(str(number), {})
    if kind == "sliding_attention":
        return {}
    num_kv_heads = fields.get("num_global_key_value_heads") if fields.get("attention_k_eq_v") else None
    sizes = {"head_dim": fields["global_head_dim"]}
    return sizes if num_kv_heads is None else sizes | {"num_key_value_heads": num_kv_heads}


def _experts(fields: read.Fields) -> Gemma4ExpertsOptions | None:
    if not fields.get("enable_moe_block"):
        return None
    return Gemma4ExpertsOptions(
        num_experts=fields["num_experts"],
        expert_size=fields["moe_intermediate_size"],
        routing=Routing(fields["top_k_experts"], normalize=True),
    )
