"""The pre-norm decoder that all architectures here share. Each architecture defines its attention options, and its
feed-forward layers if they are not `GatedMLP`."""

from collections.abc import Callable, Iterator, Sequence

import torch

from proa_engine.layers.attention import Attention, AttentionOptions, AttentionStep
from proa_engine.layers.attention_metadata import AttentionMetadata
from proa_engine.layers.cache_layers import CacheLayer, LayerCache
from proa_engine.layers.embedding import LMHead, VocabParallelEmbedding, take_vocab_share
from proa_engine.layers.mlp import GatedMLP
from proa_engine.layers.moe import SparseMoE
from proa_engine.layers.norm import RMSNorm
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.rotary import RotaryTable
from proa_engine.layers.weights import Weights
from proa_engine.models.config import ModelConfig

MLP = GatedMLP | SparseMoE
MakeMLP = Callable[[Weights, ModelConfig, ParallelContext, int], MLP]


def make_gated_mlp(weights: Weights, config: ModelConfig, parallel: ParallelContext, layer: int) -> MLP:
    return GatedMLP(weights, config.hidden_size, config.intermediate_size, parallel, bias=config.mlp_bias)


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); the running sum is passed on as `residual`."""

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        parallel: ParallelContext,
        options: AttentionOptions,
        mlp: MakeMLP,
        number: int,
    ) -> None:
        self.input_norm = RMSNorm(weights / "input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(
            weights / "self_attn",
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            parallel,
            options,
        )
        self.post_norm = RMSNorm(weights / "post_attention_layernorm", config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp(weights / "mlp", config, parallel, number)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, cache: LayerCache, step: AttentionStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.input_norm.into(self.attention.qkv.input_form, x, residual)
        x = self.attention(normed, cache, step)
        normed, residual = self.post_norm.into(self.mlp.input_form, x, residual)
        return self.mlp(normed), residual


class DecoderForCausalLM:
    """A `CausalLM`. The constructor loads all weights."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        parallel: ParallelContext,
        options: Callable[[int], AttentionOptions],
        mlp: MakeMLP = make_gated_mlp,
    ) -> None:
        """`options` and `mlp` return the attention options and the feed-forward layer of a layer by its number."""
        rows = take_vocab_share(weights / "model" / "embed_tokens", config.vocab_size, config.hidden_size, parallel)
        self.embedding = VocabParallelEmbedding(rows, parallel)
        self.layers = [
            DecoderLayer(weights / "model" / "layers" / str(layer), config, parallel, options(layer), mlp, layer)
            for layer in range(config.num_layers)
        ]
        self.norm = RMSNorm(weights / "model" / "norm", config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            rows = take_vocab_share(weights / "lm_head", config.vocab_size, config.hidden_size, parallel)
        self.lm_head = LMHead(rows, config.vocab_size, parallel, batch_invariant=config.batch_invariant)
        self.rotary = RotaryTable(config.rope, config.head_dim, config.max_position_embeddings, rows.device)
        self.batch_invariant = config.batch_invariant

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        step = AttentionStep(metadata, *self.rotary(positions), self.batch_invariant)
        x, residual = self.embedding(input_ids), None
        for layer, cache in zip(self.layers, caches, strict=True):
            x, residual = layer(x, residual, cache, step)
        assert residual is not None  # there is a layer
        return self.norm.add(x, residual)[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)

    def cache_layers(self) -> tuple[CacheLayer, ...]:
        return tuple(layer.attention.cache_layer for layer in self.layers)

    def parameters(self) -> Iterator[torch.Tensor]:
        seen: set[int] = set()
        for tensor in _tensors(self):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def _tensors(owner: object) -> Iterator[torch.Tensor]:
    """Yield every tensor that `owner`, its layers and lists of them hold."""
    if isinstance(owner, torch.Tensor):
        yield owner
    elif isinstance(owner, list | tuple):
        for item in owner:
            yield from _tensors(item)
    elif type(owner).__module__.startswith("proa_engine") and hasattr(owner, "__dict__"):
        for item in vars(owner).values():
            yield from _tensors(item)
