"""Gemma 4: Gemma 3 whose full layers have heads of another size and may take values from the keys.

The last layers may read the caches of earlier ones. Images' tokens attend to all of their image only in the larger
models, and there in layers with windows. Audio is not read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from proa_engine.kernels.experts.moe_route import Routing, route
from proa_engine.kernels.products.gpu_linear import make_linear
from proa_engine.kernels.rms_norm import rms_norm
from proa_engine.kernels.silu_and_mul import GatedActivation, activate_and_mul
from proa_engine.layers.attention import AttentionOptions, QkNorm
from proa_engine.layers.attention_metadata import AttentionMetadata, AttentionStep
from proa_engine.layers.cache_layers import CacheLayer, KeyValueLayer, LayerCache, SharedLayer
from proa_engine.layers.embedding import VocabParallelEmbedding, take_vocab_share
from proa_engine.layers.expert_split import ExpertSizes
from proa_engine.layers.experts import ExpertTensors
from proa_engine.layers.mlp import GatedMLPOptions
from proa_engine.layers.norm import NormOptions, RMSNorm
from proa_engine.layers.parallel import LayerContext, ParallelContext
from proa_engine.layers.weights import Weights
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions, ModelConfig
from proa_engine.models.decoder import DecoderForCausalLM, ImageReadingDecoder, text_weights
from proa_engine.models.families.gemma4_vision import read_gemma4_vision

_PER_LAYER_INPUT = "each layer has an input that is made of the token"


@dataclass(frozen=True, slots=True)
class Gemma4Step(AttentionStep):
    per_layer_inputs: Iterator[torch.Tensor] = field(kw_only=True)  # [T, size] for each layer, or nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4ExpertsOptions:
    sizes: ExpertSizes
    routing: Routing

    def make(self, weights: Weights, context: LayerContext, norm: NormOptions) -> "Gemma4Experts":
        return Gemma4Experts(weights, context, norm, self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4LayerOptions:
    attention: AttentionOptions
    mlp: GatedMLPOptions
    norm: NormOptions
    experts: Gemma4ExpertsOptions | None
    per_layer_size: int

    @property
    def routed_experts(self) -> ExpertSizes | None:
        return None if self.experts is None else self.experts.sizes

    @property
    def cache_kinds(self) -> tuple[type[KeyValueLayer], ...]:
        return (self.attention.cache_kind,)

    def num_parameters(self, hidden_size: int) -> int:
        experts = 0 if self.experts is None else self.experts.sizes.num_parameters(hidden_size)
        rest = experts + 2 * hidden_size * self.per_layer_size
        return self.attention.num_parameters(hidden_size) + self.mlp.num_parameters(hidden_size) + rest

    def num_copied(self, hidden_size: int, num_ranks: int) -> int:
        return self.attention.num_copied(hidden_size, num_ranks)

    def make(self, weights: Weights, context: LayerContext) -> "Gemma4Layer":
        return Gemma4Layer(weights, context, self)


class Gemma4Layer:
    """Gemma 4's layer: experts beside the feed-forward layer, an input that each token has for this layer, and a
    factor."""

    def __init__(self, weights: Weights, context: LayerContext, options: Gemma4LayerOptions) -> None:
        def norm(name: str) -> RMSNorm:
            return RMSNorm(weights / name, context.hidden_size, options.norm)

        self.input_norm = norm("input_layernorm")
        self.attention = options.attention.make(weights, context)
        self.attention_norm = norm("post_attention_layernorm")
        self.post_norm = norm("pre_feedforward_layernorm")
        self.mlp = options.mlp.make(weights, context)
        self.mlp_norm = norm("post_feedforward_layernorm")
        self.experts = None if options.experts is None else options.experts.make(weights, context, options.norm)
        size = options.per_layer_size
        self.token_input = PerLayerInput(weights, context.hidden_size, size, options.norm) if size else None
        self.factor = weights.take("layer_scalar", (1,))

    @property
    def cache_layers(self) -> tuple[KeyValueLayer, ...]:
        return (self.attention.cache_layer,)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, caches: Sequence[LayerCache], step: AttentionStep
    ) -> tuple[torch.Tensor, None]:
        """x [T, hidden_size], without a residual -> the same."""
        (cache,) = caches
        assert residual is None
        assert isinstance(step, Gemma4Step)
        normed, x = self.input_norm.into(self.attention.input_form, x, None)
        attended = self.attention_norm(self.attention(normed, cache, step))
        normed, x = self.post_norm.into(self.mlp.input_form, attended, x)
        y = self.mlp(normed)
        if self.experts is not None:
            y = self.experts(x, y)
        x = self.mlp_norm(y).add_(x)
        if self.token_input is not None:
            x = x + self.token_input(x, next(step.per_layer_inputs))
        return x.mul_(self.factor), None


class Gemma4Experts:
    """Experts that read the same input as the feed-forward layer, by norms of their own."""

    def __init__(
        self, weights: Weights, context: LayerContext, norm: NormOptions, options: Gemma4ExpertsOptions
    ) -> None:
        hidden_size, sizes = context.hidden_size, options.sizes
        router = weights / "router"
        self.router_scale = router.take("scale", (hidden_size,), dtype=torch.float32) * hidden_size**-0.5
        self.router = make_linear((router / "proj").take("weight", (sizes.num_experts, hidden_size)))
        self.routing = options.routing
        self.expert_factors = router.take("per_expert_scale", (sizes.num_experts,), dtype=torch.float32)
        storage = ExpertTensors(activation=GatedActivation("gelu_tanh"))
        self.experts = storage.load(weights / "experts", context, sizes.num_experts, sizes.inner_size)
        self.parallel = context.parallel
        self.eps = norm.eps
        self.input_norm, self.mlp_norm, self.output_norm = (
            RMSNorm(weights / name, hidden_size, norm)
            for name in (
                "pre_feedforward_layernorm_2",
                "post_feedforward_layernorm_1",
                "post_feedforward_layernorm_2",
            )
        )

    def __call__(self, x: torch.Tensor, mlp_output: torch.Tensor) -> torch.Tensor:
        """x, mlp_output [T, hidden_size] -> the sum of the normalised outputs, [T, hidden_size]"""
        logits = self.router(rms_norm(x, self.router_scale, self.eps))
        weights, chosen = route(logits, self.routing)
        weights = weights * self.expert_factors[chosen]
        y = self.parallel.all_reduce(self.experts(self.input_norm(x), weights, chosen))
        return self.output_norm(y).add_(self.mlp_norm(mlp_output))


class PerLayerInput:
    """norm(project(gelu(gate(x)) * input))"""

    def __init__(self, weights: Weights, hidden_size: int, size: int, norm: NormOptions) -> None:
        self.gate = make_linear((weights / "per_layer_input_gate").take("weight", (size, hidden_size)))
        self.projection = make_linear((weights / "per_layer_projection").take("weight", (hidden_size, size)))
        self.norm = RMSNorm(weights / "post_per_layer_input_norm", hidden_size, norm)

    def __call__(self, x: torch.Tensor, token_input: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size], token_input [T, size] -> [T, hidden_size]"""
        gated = activate_and_mul(torch.cat((self.gate(x), token_input), dim=-1), "gelu_tanh")
        return self.norm(self.projection(gated))


class PerLayerInputs:
    """Gemma 4's inputs for each layer: an embedding of the token, and a projection of its embedding for the first
    layer."""

    def __init__(
        self,
        weights: Weights,
        hidden_size: int,
        num_layers: int,
        size: int,
        vocab_size: int,
        norm: NormOptions,
        parallel: ParallelContext,
    ) -> None:
        width = num_layers * size
        rows = take_vocab_share(weights / "embed_tokens_per_layer", vocab_size, width, parallel)
        self.embedding = VocabParallelEmbedding(rows, parallel)
        self.embedding_scale = float(torch.tensor(size**0.5, dtype=rows.dtype))
        self.projection = make_linear((weights / "per_layer_model_projection").take("weight", (width, hidden_size)))
        self.projection_scale = hidden_size**-0.5
        self.norm = RMSNorm(weights / "per_layer_projection_norm", size, norm)
        self.shape = num_layers, size

    def __call__(self, input_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """input_ids [T] int64, x [T, hidden_size] -> [num_layers, T, size]"""
        embedded = self.embedding(input_ids).mul_(self.embedding_scale).view(-1, *self.shape)
        projected = self.norm(self.projection(x).mul_(self.projection_scale).view(-1, *self.shape))
        return projected.add_(embedded).mul_(2**-0.5).transpose(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Options(DecoderOptions):
    per_layer_size: int  # inputs that a token has for each layer; 0: none
    per_layer_vocab_size: int
    pad_token_id: int


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
        read.require(fields, "use_bidirectional_attention", ("vision",))
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
            needs_token_ids=_PER_LAYER_INPUT if fields["hidden_size_per_layer_input"] else "",
            undivided=_undivided(fields),
            per_layer_size=fields["hidden_size_per_layer_input"],
            per_layer_vocab_size=fields["vocab_size_per_layer_input"],
            pad_token_id=fields.get("pad_token_id") or 0,
        )

    def __init__(self, config: ModelConfig, weights: Weights, parallel: ParallelContext) -> None:
        super().__init__(config, weights, parallel)
        self.per_layer_inputs: PerLayerInputs | None = None
        options = config.decoder
        assert isinstance(options, Gemma4Options)
        assert isinstance(options.norm, NormOptions)
        self.pad_token_id = options.pad_token_id
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
        self, inputs: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> tuple[torch.Tensor, AttentionStep]:
        x, _ = super().begin(inputs, positions, metadata)
        if metadata.media:  # its tokens have the inputs of padding
            inputs = inputs.index_fill(0, metadata.media.rows, self.pad_token_id)
        per_layer = () if self.per_layer_inputs is None else self.per_layer_inputs(inputs, x).unbind()
        return x, Gemma4Step(metadata, positions, self.batch_invariant, per_layer_inputs=iter(per_layer))

    def cache_layers(self) -> tuple[CacheLayer, ...]:
        """A layer that only reads has the cache of the last one before that caches the same."""
        layers: list[CacheLayer] = []
        last: dict[CacheLayer, int] = {}
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Gemma4Layer)
            (own,) = layer.cache_layers
            if layer.attention.only_reads:
                layers.append(SharedLayer(last[own]))
            else:
                layers.append(own)
                last[own] = number
        return tuple(layers)


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM, ImageReadingDecoder):
    """Gemma 4 with an image encoder."""

    defaults: ClassVar[read.Fields] = {
        **Gemma4ForCausalLM.defaults,
        "boi_token_id": 255_999,
        "eoi_token_id": 258_882,
        "image_token_id": 258_880,
    }
    read_images = staticmethod(read_gemma4_vision)


def _attention(fields: read.Fields) -> list[AttentionOptions]:
    """Read the attention options of each layer."""
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
            within_images=kind == "sliding_attention",
            qk_norm=QkNorm(norm),
            norm_values=True,
            values_are_keys=bool(fields.get("attention_k_eq_v")) and kind == "full_attention",
            only_reads=number >= first_shared,
        )
        result.append(options)
    return result


def _undivided(fields: read.Fields) -> str:
    """As `DecoderOptions.undivided`."""
    if fields["hidden_size_per_layer_input"]:
        return _PER_LAYER_INPUT
    return "layers read the caches of earlier ones" if fields.get("num_kv_shared_layers") else ""


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
        sizes=ExpertSizes(fields["num_experts"], fields["moe_intermediate_size"]),
        routing=Routing(fields["top_k_experts"], normalize=True),
    )
