"""MTP: layers of a model's own checkpoint that predict the token behind the next one (multi-token prediction,
DeepSeek-V3, arXiv 2412.19437). The first of them drafts.

    read   = the model's hidden state, behind its last norm            [T, hidden_size]; later the layer's own output
    x      = projection(embedding_norm(embedding), hidden_norm(read))  beside each other; MiMo has the second first
    y      = layer(x)                                                  a layer as the model's
    logits = lm_head(final_norm(y))

Embedding and LM head are the model's: checkpoints repeat them or leave them out. `_FORMS` has what families differ in.
The library `speculators` takes the layer out of checkpoints of Qwen, to train it further, and stores it alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from proa_engine.layers.attention import Attention
from proa_engine.layers.attention_metadata import AttentionMetadata, AttentionStep
from proa_engine.layers.cache_layers import CacheLayer, LayerCache, StateLayer
from proa_engine.layers.latent_attention import LatentAttention
from proa_engine.layers.norm import NormOptions, RMSNorm
from proa_engine.layers.parallel import LayerContext
from proa_engine.layers.weights import LinearMethod, Projection, Slice, Weights
from proa_engine.models import fields as read_fields
from proa_engine.models.config import ModelConfig
from proa_engine.models.decoder import DecoderForCausalLM, tensors_of, total
from proa_engine.models.decoder_layer import DecoderLayer, LayerDeclaration
from proa_engine.models.drafters.base import LIBRARY_TYPE, Entries, check_sizes, own_linear_method
from proa_engine.models.text_prefix import text_prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpForm:
    """How a family stores the layer, and how it differs in what it computes. `{layer}`: the first one's name."""

    embedding_norm: str
    hidden_norm: str
    projection: str
    layer: str
    final_norm: str
    repeated: tuple[str, ...] = ()  # tensors of the model that the checkpoint may repeat
    first_is_masked: bool = False  # the embedding in entry 0 is zero
    reads_normed: bool = True  # the next entries read the output behind the final norm
    hidden_first: bool = False  # the order of what the projection reads

    def of(self, layer: str) -> "MtpForm":
        """The form with this name of the layer."""
        return replace(
            self,
            embedding_norm=self.embedding_norm.format(layer=layer),
            hidden_norm=self.hidden_norm.format(layer=layer),
            projection=self.projection.format(layer=layer),
            layer=self.layer.format(layer=layer),
            final_norm=self.final_norm.format(layer=layer),
            repeated=tuple(each.format(layer=layer) for each in self.repeated),
        )


_OF_QWEN = MtpForm(
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    projection="mtp.fc",
    layer="mtp.layers.0",
    final_norm="mtp.norm",
)
_OF_DEEPSEEK = MtpForm(
    embedding_norm="{layer}.enorm",
    hidden_norm="{layer}.hnorm",
    projection="{layer}.eh_proj",
    layer="{layer}",
    final_norm="{layer}.shared_head.norm",
    repeated=("{layer}.embed_tokens", "{layer}.shared_head.head"),
    first_is_masked=True,
)
_OF_GLM = replace(_OF_DEEPSEEK, reads_normed=False)
_OF_MIMO = MtpForm(
    embedding_norm="model.mtp_layers.0.token_layernorm",
    hidden_norm="model.mtp_layers.0.hidden_layernorm",
    projection="model.mtp_layers.0.input_proj",
    layer="model.mtp_layers.0",
    final_norm="model.mtp_layers.0.final_layernorm",
    first_is_masked=True,
    hidden_first=True,
)
_OF_LIBRARY = MtpForm(
    embedding_norm="mtp_layers.0.token_layernorm",
    hidden_norm="mtp_layers.0.hidden_layernorm",
    projection="mtp_layers.0.input_proj",
    layer="mtp_layers.0",
    final_norm="mtp_layers.0.final_layernorm",
)
_FORMS: Mapping[str, MtpForm] = {
    "DeepseekV3ForCausalLM": _OF_DEEPSEEK,
    "Glm4MoeForCausalLM": _OF_GLM,
    "Glm4MoeLiteForCausalLM": _OF_GLM,
    "MiMoForCausalLM": _OF_MIMO,
    "Qwen3NextForCausalLM": _OF_QWEN,
    "Qwen3_5ForCausalLM": _OF_QWEN,
    "Qwen3_5ForConditionalGeneration": _OF_QWEN,
    "Qwen3_5MoeForCausalLM": _OF_QWEN,
    "Qwen3_5MoeForConditionalGeneration": _OF_QWEN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpOptions:
    form: MtpForm  # with the names of this checkpoint
    hidden_size: int
    layer: LayerDeclaration
    norm: NormOptions
    linear_method: LinearMethod

    def is_unread(self, name: str) -> bool:
        form = self.form
        own = (form.embedding_norm, form.hidden_norm, form.projection, form.layer, form.final_norm)
        return not _is_within(name, own) or _is_within(name, form.repeated)

    def make(self, weights: Weights, model: DecoderForCausalLM, context: LayerContext) -> "MtpDrafter":
        return MtpDrafter(weights, model, context, self)


def read_mtp(target: ModelConfig, names: Sequence[str]) -> MtpOptions:
    """Describe the layer of a checkpoint with tensors of these names; none: its weights are random. Raises ValueError,
    naming the tensor, if it has no such layer."""
    form = _FORMS.get(target.architecture)
    if not form:
        known = ", ".join(_FORMS)
        raise ValueError(f"method mtp is not supported for {target.architecture}; supported: {known}")
    known_names = frozenset(names)
    decoder = text_prefix(known_names.__contains__).decoder
    layer = f"{decoder}.layers.{len(target.layers)}".removeprefix(".")
    form = form.of(layer)
    if names and f"{form.embedding_norm}.weight" not in known_names:
        raise ValueError(
            f"method mtp needs a layer for further tokens, and the checkpoint has no {form.embedding_norm}"
        )
    full = next(layer for layer in reversed(target.layers) if StateLayer not in layer.cache_kinds)
    assert isinstance(target.decoder.norm, NormOptions)
    return MtpOptions(
        form=form,
        hidden_size=target.hidden_size,
        layer=full,
        norm=target.decoder.norm,
        linear_method=target.linear_method,
    )


def read_library_mtp(config: Mapping[str, Any], target: ModelConfig, quantization: str | None) -> MtpOptions:
    """Describe the layer in a checkpoint of `speculators` with this config.json. Raises ValueError, naming the field,
    for what is not supported."""
    read_fields.require(config, LIBRARY_TYPE, ("mtp",))
    read_fields.require(config, "num_nextn_predict_layers", (1,))
    fields = config["transformer_layer_config"]
    check_sizes(target, fields["hidden_size"], fields["vocab_size"])
    if _FORMS.get(target.architecture) is not _OF_QWEN:
        known = ", ".join(name for name, form in _FORMS.items() if form is _OF_QWEN)
        raise ValueError(f"{LIBRARY_TYPE} mtp is not supported for {target.architecture}; supported: {known}")
    return replace(read_mtp(target, ()), form=_OF_LIBRARY, linear_method=own_linear_method(config, quantization))


class MtpDrafter:
    """A `HiddenDrafter`. The constructor loads all weights."""

    def __init__(self, weights: Weights, model: DecoderForCausalLM, context: LayerContext, options: MtpOptions) -> None:
        form, size = options.form, options.hidden_size
        self.taps: tuple[int, ...] = ()
        self.read_size = size
        self.batch_invariant = model.batch_invariant
        self.embedding = model.embedding
        self.compute = model.compute_logits
        self.embedding_norm, self.hidden_norm, self.final_norm = (
            RMSNorm(weights / name, size, options.norm)
            for name in (form.embedding_norm, form.hidden_norm, form.final_norm)
        )
        whole = Projection(weights / form.projection, size, 2 * size, Slice(0, 0, size))
        self.projection = weights.method.load([whole], None).product
        layer = options.layer.make(weights / form.layer, context)
        assert isinstance(layer, DecoderLayer)
        assert isinstance(layer.attention, Attention | LatentAttention), "read_mtp takes no recurrent layer"
        self.layer, self.attention = layer, layer.attention
        self.first_is_masked, self.reads_normed = form.first_is_masked, form.reads_normed
        self.hidden_first = form.hidden_first

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def observe(self, entries: Entries, caches: Sequence[LayerCache], metadata: AttentionMetadata) -> None:
        step = AttentionStep(metadata, entries.positions, self.batch_invariant)
        (cache,) = caches
        x = self._project(entries)
        self.attention.store(self.layer.input_norm.into(self.attention.input_form, x, None)[0], cache, step)

    def __call__(self, entries: Entries, caches: Sequence[LayerCache], metadata: AttentionMetadata) -> torch.Tensor:
        step = AttentionStep(metadata, entries.positions, self.batch_invariant)
        x, residual = self.layer(self._project(entries), None, caches, step)
        y = total(x, residual)
        return self.final_norm(y) if self.reads_normed else y

    def _project(self, entries: Entries) -> torch.Tensor:
        embedded = self.embedding(entries.input_ids)
        if self.first_is_masked:
            embedded = embedded * (entries.positions > 0)[:, None]
        parts = self.embedding_norm(embedded), self.hidden_norm(entries.read)
        return self.projection(torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.compute(hidden if self.reads_normed else self.final_norm(hidden))

    def cache_layers(self) -> tuple[CacheLayer, ...]:
        return self.layer.cache_layers

    def parameters(self) -> Iterator[torch.Tensor]:
        yield from {id(tensor): tensor for tensor in tensors_of(self)}.values()


def _is_within(name: str, owners: Sequence[str]) -> bool:
    return name.startswith(tuple(f"{owner}." for owner in owners))
