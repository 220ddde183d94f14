"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one layer over the embedding of the next token beside the states of this
one behind three layers of the model.

    read  = fc(states before the layers `taps`)                        [T, hidden_size]; later the layer's own output
    x     = attention(input_norm(embedding), hidden_norm(read))        q, k and v read both beside each other
    sum   = read + x, or hidden_norm(read) + x
    y     = sum + mlp(post_norm(sum))                                  what the next entries read
    logits = lm_head(norm(y))                                          of a vocabulary of its own

Checkpoints have one of two forms: the original one (`LlamaForCausalLMEagle3`) and that of the library `speculators`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from proa_engine.kernels.products.gpu_linear import make_linear
from proa_engine.layers.attention import AttentionOptions, QkNorm
from proa_engine.layers.attention_metadata import AttentionMetadata, AttentionStep
from proa_engine.layers.cache_layers import CacheLayer, LayerCache
from proa_engine.layers.mlp import GatedMLPOptions
from proa_engine.layers.norm import NormOptions, RMSNorm
from proa_engine.layers.parallel import LayerContext
from proa_engine.layers.weights import LinearMethod, Weights
from proa_engine.models import fields as read_fields
from proa_engine.models.config import ModelConfig
from proa_engine.models.decoder import DecoderForCausalLM, tensors_of
from proa_engine.models.drafters.base import LIBRARY_TYPE, Entries, own_linear_method
from proa_engine.models.drafters.parts import (
    DrafterSizes,
    DraftHead,
    fields_of,
    make_embedding,
    read_sizes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Options:
    layer: str  # the name of the layer's tensors
    taps: tuple[int, ...]
    sizes: DrafterSizes
    attention: AttentionOptions
    mlp: GatedMLPOptions
    norm: NormOptions
    norm_before_residual: bool  # the normed state is what attention is added to
    norm_before_fc: bool  # one norm over all states beside each other
    norms_of_taps: bool  # a norm for each
    norm_output: bool  # the next entries read the normed output
    linear_method: LinearMethod

    @property
    def hidden_size(self) -> int:
        return self.sizes.hidden_size

    def is_unread(self, name: str) -> bool:
        return name == "t2d" or name.endswith(".rotary_emb.inv_freq")  # which of the model's ids the drafter has

    def make(self, weights: Weights, model: DecoderForCausalLM, context: LayerContext) -> "Eagle3Drafter":
        return Eagle3Drafter(weights, model, context, self)


def read_eagle3(config: Mapping[str, Any], target: ModelConfig, quantization: str | None) -> Eagle3Options:
    """Read a drafter's config.json in either form. Raises ValueError, naming the field, for what is not supported."""
    is_library, fields = LIBRARY_TYPE in config, fields_of(config)
    read_fields.require(config, LIBRARY_TYPE, ("eagle3",))
    read_fields.require(fields, "model_type", ("llama", "qwen3"))
    read_fields.require(fields, "num_hidden_layers", (1,))
    if "sliding_attention" in (fields.get("layer_types") or ()):
        raise ValueError("layer_types sliding_attention is not supported in a drafter; supported: full_attention")
    aux = config.get("eagle_config") or {}
    read_fields.require(aux, "use_aux_hidden_state", (True,))
    taps = config.get("eagle_aux_hidden_state_layer_ids") or aux.get("eagle_aux_hidden_state_layer_ids")
    num_layers = len(target.layers)
    taps = tuple(taps or (2, num_layers // 2, num_layers - 3))
    sizes = read_sizes(config, target, taps)
    norm = read_fields.norm(fields)
    qk_norm = QkNorm(norm) if fields.get("model_type") == "qwen3" else None
    return Eagle3Options(
        layer="layers.0" if is_library else "midlayer",
        taps=taps,
        sizes=sizes,
        attention=read_fields.attention(fields, qk_norm=qk_norm, input_size=2 * sizes.hidden_size),
        mlp=read_fields.gated_mlp(fields),
        norm=norm,
        norm_before_residual=config.get("norm_before_residual", is_library),
        norm_before_fc=config.get("norm_before_fc", False),
        norms_of_taps=config.get("fc_norm", False),
        norm_output=config.get("norm_output", False),
        linear_method=own_linear_method(config, quantization),
    )


class Eagle3Drafter:
    """A `HiddenDrafter`. The constructor loads all weights."""

    def __init__(
        self, weights: Weights, model: DecoderForCausalLM, context: LayerContext, options: Eagle3Options
    ) -> None:
        sizes, parallel = options.sizes, context.parallel
        size = sizes.hidden_size
        self.taps = options.taps
        self.read_size = size
        self.batch_invariant = model.batch_invariant
        states_size = len(options.taps) * sizes.target_hidden_size
        count, width = (1, states_size) if options.norm_before_fc else (len(options.taps), sizes.target_hidden_size)
        names = ["input_norm"] if options.norm_before_fc else [f"fc_norm.{number}" for number in range(count)]
        has_norms = options.norm_before_fc or options.norms_of_taps
        self.state_norms = [RMSNorm(weights / name, width, options.norm) for name in names if has_norms]
        self.fc = make_linear((weights / "fc").take("weight", (size, states_size)))
        layer, norm = weights / options.layer, options.norm
        self.input_norm = RMSNorm(layer / "input_layernorm", size, norm)
        self.hidden_norm = RMSNorm(layer / "hidden_norm", size, norm)
        self.attention = options.attention.make(layer, context)
        self.post_norm = RMSNorm(layer / "post_attention_layernorm", size, norm)
        self.mlp = options.mlp.make(layer, context)
        self.norm = RMSNorm(weights / "norm", size, norm)
        self.norm_before_residual, self.norm_output = options.norm_before_residual, options.norm_output
        self.embedding = make_embedding(weights, model, sizes, parallel)
        self.lm_head = DraftHead(weights, model, sizes, parallel)

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        if self.state_norms:
            parts = states.chunk(len(self.state_norms), dim=-1)
            normed = [norm(part.contiguous()) for norm, part in zip(self.state_norms, parts, strict=True)]
            states = torch.cat(normed, dim=-1)
        return self.fc(states)

    def observe(self, entries: Entries, caches: Sequence[LayerCache], metadata: AttentionMetadata) -> None:
        (cache,) = caches
        step = AttentionStep(metadata, entries.positions, self.batch_invariant)
        self.attention.store(self._beside(entries.input_ids, self.hidden_norm(entries.read)), cache, step)

    def __call__(self, entries: Entries, caches: Sequence[LayerCache], metadata: AttentionMetadata) -> torch.Tensor:
        (cache,) = caches
        step = AttentionStep(metadata, entries.positions, self.batch_invariant)
        normed = self.hidden_norm(entries.read)
        x = self.attention(self._beside(entries.input_ids, normed), cache, step)
        residual = normed if self.norm_before_residual else entries.read
        between, residual = self.post_norm.into(self.mlp.input_form, x, residual)
        x = self.mlp(between)
        return self.norm.add(x, residual)[0] if self.norm_output else x + residual

    def _beside(self, input_ids: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.input_norm(self.embedding(input_ids)), normed), dim=-1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden if self.norm_output else self.norm(hidden))

    def cache_layers(self) -> tuple[CacheLayer, ...]:
        return (self.attention.cache_layer,)

    def parameters(self) -> Iterator[torch.Tensor]:
        yield from {id(tensor): tensor for tensor in tensors_of(self)}.values()
