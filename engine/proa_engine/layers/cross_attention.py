"""Cross-attention: each token reads the whole audio of its request, whose keys and values were written once.

Heads are sharded over ranks as in self-attention. Adapters cannot be applied to the products of keys and values: these
belong to an audio, which requests with different adapters share.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from proa_engine.kernels.attention.paged_attention import paged_attention
from proa_engine.kernels.attention.store_kv import cache_rows, store_kv
from proa_engine.layers.attention_metadata import AttentionStep
from proa_engine.layers.cache_layers import CrossLayer, LayerCache
from proa_engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear, column_projections
from proa_engine.layers.parallel import LayerContext
from proa_engine.layers.weights import Weights

MEDIAN_WIDTH = 7  # of the filter along the audio, as in OpenAI's Whisper


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttentionOptions:
    num_heads: int
    head_dim: int
    num_tokens: int  # of the longest audio
    name: str = "encoder_attn"

    def num_parameters(self, hidden_size: int) -> int:
        return 4 * self.num_heads * self.head_dim * hidden_size

    def make(self, weights: Weights, context: LayerContext) -> "CrossAttention":
        return CrossAttention(weights / self.name, context, self)


class CrossAttention:
    """Queries, values and the output have a bias, keys have none."""

    def __init__(self, weights: Weights, context: LayerContext, options: CrossAttentionOptions) -> None:
        hidden_size, parallel = context.hidden_size, context.parallel
        heads = parallel.heads(options.num_heads, options.num_heads, "attention heads").heads
        share = heads.times(options.head_dim)
        self.heads = heads
        self.cache_layer = CrossLayer(heads.length, options.head_dim, options.num_tokens)
        self.query = MergedColumnParallelLinear(
            column_projections(weights, ("q_proj",), hidden_size, (share,)), bias=True
        )
        self.output = RowParallelLinear(weights / "o_proj", share, hidden_size, parallel, bias=True)
        key, value = column_projections(weights, ("k_proj", "v_proj"), hidden_size, (share, share))
        self.key_weight = weights.method.take_matrix(key)
        self.value_weight = weights.method.take_matrix(value)
        self.value_bias = value.weights.take("bias", (share.total,), share.along(0))

    def __call__(self, x: torch.Tensor, cache: LayerCache, step: AttentionStep) -> torch.Tensor:
        """x [T, hidden_size] -> the same shape"""
        rows, head_dim = step.metadata.audio, self.cache_layer.head_dim
        assert rows, "every request reads an audio"
        keys, values = cache.tensors
        query = self.query(x).unflatten(1, (-1, head_dim))
        if queries := step.metadata.cross_queries:
            queries.keep(query)
        out = paged_attention(
            query,
            keys,
            values,
            rows.query_start_loc,
            rows.seq_lens,
            rows.block_table,
            step.audio_plan(rows, cache),
            num_decodes=x.shape[0],
            scale=head_dim**-0.5,
        )
        return self.output(out.flatten(1))

    def write(self, encoded: torch.Tensor, cache: LayerCache, slot_mapping: torch.Tensor) -> None:
        """Write keys and values of an audio, encoded [N, hidden_size], to the slots [N] int64."""
        keys, values = cache.tensors
        key = F.linear(encoded, self.key_weight)
        value = F.linear(encoded, self.value_weight, self.value_bias)
        rows = cache_rows(slot_mapping, keys.shape, keys.stride(0)) if keys.is_cpu else None
        shape = -1, self.cache_layer.head_dim
        store_kv(key.unflatten(1, shape), value.unflatten(1, shape), keys, values, slot_mapping, rows)


def alignment(query: torch.Tensor, key: torch.Tensor, num_kept: int) -> torch.Tensor:
    """How much the tokens of a whole text read of each token of an audio by one head, query [N, D] and key [M, D],
    compared with the other tokens of the text: [N, num_kept] float32, as OpenAI's Whisper computes it."""
    scores = query.float() @ key.float().T * query.shape[1] ** -0.5
    read = scores.softmax(dim=-1)[:, :num_kept]
    deviation, mean = torch.std_mean(read, dim=0, correction=0)
    # Without the minimum, what no token reads would be no number.
    return _median((read - mean) / deviation.clamp_min(torch.finfo(torch.float32).tiny))


def _median(x: torch.Tensor) -> torch.Tensor:
    """The median of each value of x [N, M] and the three before and behind it; beyond the ends x is mirrored."""
    half = MEDIAN_WIDTH // 2
    if x.shape[1] <= half:
        return x
    padded = F.pad(x[None], (half, half), mode="reflect")[0]
    return padded.unfold(1, MEDIAN_WIDTH, 1).sort(dim=-1).values[..., half]
