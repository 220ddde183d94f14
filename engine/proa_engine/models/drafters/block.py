"""Layers that propose a block of tokens at once: DFlash (Chen et al. 2026, arXiv 2602.06036) and DSpark.

    context = hidden_norm(fc(states behind the layers `target_layer_ids`))     [T, hidden_size]
    a token of the context has in each layer the keys and values of `context`
    x       = layers(embeddings of the request's last token and of masks)      each attends to the context and the block
    logits  = lm_head(norm(x))

DFlash reads draft j off mask j, DSpark off the token before mask j, and adds a bigram's logits (Markov head):

    logits of draft j += markov_w2 · markov_w1[draft j - 1]

so DSpark's tokens are chosen one after the other, after one pass of the layers. Its confidence head is not read: how
many tokens are drafted is measured (`core.timing.draft_depth`).

Checkpoints have the fields of a Qwen3 model in config.json and `dflash_config` (DFlash) or more fields beside them
(DSpark), or the form of the library `speculators`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from proa_engine.json_configs import SpeculativeConfig
from proa_engine.kernels.products.gpu_linear import make_linear
from proa_engine.layers.attention import Attention, QkNorm
from proa_engine.layers.attention_metadata import AttentionMetadata, AttentionStep
from proa_engine.layers.cache_layers import CacheLayer, LayerCache
from proa_engine.layers.norm import NormOptions, RMSNorm
from proa_engine.layers.parallel import LayerContext
from proa_engine.layers.weights import LinearMethod, Weights
from proa_engine.models import fields as read_fields
from proa_engine.models.config import ModelConfig
from proa_engine.models.decoder import DecoderForCausalLM, tensors_of, total
from proa_engine.models.decoder_layer import LayerOptions
from proa_engine.models.drafters.base import LIBRARY_TYPE, own_linear_method
from proa_engine.models.drafters.draft_number import block_fields, most_drafts, samples_last
from proa_engine.models.drafters.parts import (
    DrafterSizes,
    DraftHead,
    fields_of,
    make_embedding,
    read_sizes,
)

# Fields with the values that are supported. DFlash2 has convolutions and chooses tokens with a selector.
_SUPPORTED: Mapping[str, Sequence[object]] = {
    "attention_sink_bias": (False,),
    "conv_kernel_size": (0,),
    "final_logit_softcapping": (),
    "is_neox_style": (True,),
    "logit_scale": (1.0,),
    "markov_head_type": ("vanilla",),
    "output_multiplier": (1.0,),
    "selector_top_k": (0,),
    "use_swa": (False,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions:
    taps: tuple[int, ...]
    sizes: DrafterSizes
    layers: tuple[LayerOptions, ...]
    norm: NormOptions
    mask_token_id: int
    samples_last: bool
    markov_rank: int  # 0: without a Markov head
    linear_method: LinearMethod

    @property
    def hidden_size(self) -> int:
        return self.sizes.hidden_size

    def is_unread(self, name: str) -> bool:
        return name == "t2d" or name.startswith("confidence_head.") or name.endswith(".rotary_emb.inv_freq")

    def make(self, weights: Weights, model: DecoderForCausalLM, context: LayerContext) -> "BlockLayers":
        return (
            MarkovLayers(weights, model, context, self)
            if self.markov_rank
            else BlockLayers(weights, model, context, self)
        )


def read_block(config: Mapping[str, Any], target: ModelConfig, speculative: SpeculativeConfig) -> BlockOptions:
    """Read a drafter's config.json in either form. Raises ValueError, naming the field, for what is not supported."""
    fields = fields_of(config)
    own = block_fields(config)
    read_fields.require(config, LIBRARY_TYPE, (speculative.method,))
    read_fields.require(fields, "model_type", ("qwen3",))
    for name, supported in _SUPPORTED.items():
        read_fields.require(own, name, supported)
    markov_rank = own.get("markov_rank") or 0
    if (speculative.method == "dspark") != (markov_rank > 0):
        raise ValueError(
            f"markov_rank is {markov_rank}: take method dspark for drafters with a Markov head, dflash for others"
        )
    most = most_drafts(own, speculative.method)
    if speculative.max_drafts > most:
        raise ValueError(
            f"num_speculative_tokens is {speculative.max_drafts}, and its blocks have at most {most} draft tokens"
        )
    taps = _taps(own, fields["num_hidden_layers"], len(target.layers))
    sizes, mask_token_id = read_sizes(config, target, taps), own["mask_token_id"]
    if not 0 <= mask_token_id < target.vocab_size:
        raise ValueError(f"mask_token_id is {mask_token_id}, and the model's vocabulary has {target.vocab_size} tokens")
    return BlockOptions(
        taps=taps,
        sizes=sizes,
        layers=_layers(own, fields),
        norm=read_fields.norm(fields),
        mask_token_id=mask_token_id,
        samples_last=samples_last(own, speculative.method),
        markov_rank=markov_rank,
        linear_method=own_linear_method(config, speculative.quantization),
    )


def _taps(own: Mapping[str, Any], num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """The numbers of layers before which states are read. `target_layer_ids` counts those behind which they are."""
    if LIBRARY_TYPE in own:
        return tuple(own["aux_hidden_state_layer_ids"])
    if ids := own.get("target_layer_ids"):
        return tuple(number + 1 for number in ids)
    if num_layers == 1:
        return (num_target_layers // 2 + 1,)
    step = (num_target_layers - 4) / (num_layers - 1)
    return tuple(round(1 + number * step) + 1 for number in range(num_layers))


def _layers(own: Mapping[str, Any], fields: Mapping[str, Any]) -> tuple[LayerOptions, ...]:
    """Layers with a window are causal and others are not, unless the checkpoint says otherwise."""
    norm, mlp = read_fields.norm(fields), read_fields.gated_mlp(fields)
    types = read_fields.layer_types(fields, ("full_attention",) * fields["num_hidden_layers"])
    given = [own[name] for name in ("is_causal", "causal") if isinstance(own.get(name), bool)]
    layers = []
    for window in read_fields.windows(fields, types):
        is_causal = given[0] if given else bool(window) and not own.get("sliding_window_non_causal")
        if window and not is_causal:
            raise ValueError("layer type sliding_attention is not supported without causal attention")
        attention = read_fields.attention(fields, qk_norm=QkNorm(norm), window=window, causal=is_causal)
        layers.append(LayerOptions(attention=attention, mlp=mlp, norm=norm))
    return tuple(layers)


class BlockLayers:
    """A `BlockDrafter`. The constructor loads all weights."""

    def __init__(
        self, weights: Weights, model: DecoderForCausalLM, context: LayerContext, options: BlockOptions
    ) -> None:
        sizes = options.sizes
        size = sizes.hidden_size
        self.taps, self.mask_token_id, self.samples_last = options.taps, options.mask_token_id, options.samples_last
        self.fc = make_linear((weights / "fc").take("weight", (size, len(options.taps) * sizes.target_hidden_size)))
        self.hidden_norm = RMSNorm(weights / "hidden_norm", size, options.norm)
        self.layers = [layer.make(weights / f"layers.{number}", context) for number, layer in enumerate(options.layers)]
        self.norm = RMSNorm(weights / "norm", size, options.norm)
        self.embedding = make_embedding(weights, model, sizes, context.parallel)
        self.lm_head = DraftHead(weights, model, sizes, context.parallel)

    def observe(
        self,
        states: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
    ) -> None:
        context, step = self.hidden_norm(self.fc(states)), _step(metadata, positions)
        for layer, cache in zip(self.layers, caches, strict=True):
            assert isinstance(layer.attention, Attention)
            layer.attention.store(context, cache, step)

    def draft(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        x, residual, step = self.embedding(input_ids), None, _step(metadata, positions)
        for layer, cache in zip(self.layers, caches, strict=True):
            x, residual = layer(x, residual, (cache,), step)
        return self.norm(total(x, residual))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head.compute_logits(hidden)

    def follow(self, logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head.of_model(logits)

    def cache_layers(self) -> tuple[CacheLayer, ...]:
        return tuple(layer.attention.cache_layer for layer in self.layers)

    def parameters(self) -> Iterator[torch.Tensor]:
        yield from {id(tensor): tensor for tensor in tensors_of(self)}.values()


class MarkovLayers(BlockLayers):
    """With a Markov head, which every rank has whole: a share of it would need a reduction for each draft token."""

    def __init__(
        self, weights: Weights, model: DecoderForCausalLM, context: LayerContext, options: BlockOptions
    ) -> None:
        super().__init__(weights, model, context, options)
        head, rank = weights / "markov_head", options.markov_rank
        self.before = (head / "markov_w1").take("weight", (options.sizes.vocab_size, rank))
        self.behind = make_linear((head / "markov_w2").take("weight", (options.sizes.draft_vocab_size, rank)))

    def follow(self, logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return super().follow(logits + self.behind(self.before.index_select(0, token_ids)), token_ids)


def _step(metadata: AttentionMetadata, positions: torch.Tensor) -> AttentionStep:
    return AttentionStep(metadata, positions, batch_invariant=False)  # drafts change no output
