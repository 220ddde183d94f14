"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads from one cached row a
token.

The up-projections of keys and values are absorbed: queries are mapped to the latent's space and outputs back from it,
so that attention reads each row once for all heads. Heads are sharded over ranks; where rows are, see `latent_rows`.
"""

from dataclasses import dataclass, replace

import torch

from proa_engine.kernels.attention.latent_attention import cache_latents, rotate_part
from proa_engine.kernels.products.gpu_linear import HeadLinear
from proa_engine.kernels.products.skinny_gemm import Activation
from proa_engine.layers.attention_metadata import AttentionStep
from proa_engine.layers.cache_layers import LatentLayer, LayerCache
from proa_engine.layers.latent_rows import latent_rows
from proa_engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from proa_engine.layers.norm import NormOptions, RMSNorm
from proa_engine.layers.parallel import LayerContext
from proa_engine.layers.rotary import RopeConfig
from proa_engine.layers.shares import share_heads
from proa_engine.layers.weights import Projection, Slice, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionOptions:
    """One layer's sizes, before sharding."""

    num_heads: int
    query_rank: int | None  # queries come from a latent of this size; None: from the input
    rank: int  # of the latent of keys and values
    nope_dim: int  # of a head's queries and keys, not rotated
    rope_dim: int  # likewise, rotated
    value_dim: int
    rope: RopeConfig
    interleaved: bool  # the rotation's pairs are neighbours
    scale: float  # of the scores
    norm: NormOptions

    @property
    def cache_kind(self) -> type[LatentLayer]:
        return LatentLayer

    def num_parameters(self, hidden_size: int) -> int:
        query = self.num_heads * (self.nope_dim + self.rope_dim)
        queries = hidden_size * query if self.query_rank is None else self.query_rank * (hidden_size + query)
        latent = hidden_size * (self.rank + self.rope_dim)
        heads = self.num_heads * (self.rank * (self.nope_dim + self.value_dim) + self.value_dim * hidden_size)
        return queries + latent + heads

    def num_copied(self, hidden_size: int, num_ranks: int) -> int:
        shares = share_heads(self.num_heads, self.num_heads, 0, num_ranks, "attention heads")
        largest = replace(self, num_heads=shares.heads.length)  # each rank has the whole latents
        return largest.num_parameters(hidden_size) - self.num_parameters(hidden_size) // num_ranks

    def make(self, weights: Weights, context: LayerContext) -> "LatentAttention":
        return LatentAttention(weights / "self_attn", context, self)


class LatentAttention:
    def __init__(self, weights: Weights, context: LayerContext, options: LatentAttentionOptions) -> None:
        self.options = options
        parallel, hidden_size = context.parallel, context.hidden_size
        heads = parallel.heads(options.num_heads, options.num_heads, "attention heads").heads
        self.num_heads = heads.length
        query_dim = options.nope_dim + options.rope_dim
        latent = _whole(weights / "kv_a_proj_with_mqa", options.rank + options.rope_dim, hidden_size)
        rows = heads.times(query_dim)
        if options.query_rank is None:
            query = Projection(weights / "q_proj", rows.total, hidden_size, rows.along(0))
            self.query_norm = self.query = None
        else:
            query = _whole(weights / "q_a_proj", options.query_rank, hidden_size)
            self.query_norm = RMSNorm(weights / "q_a_layernorm", options.query_rank, options.norm)
            up = Projection(weights / "q_b_proj", rows.total, options.query_rank, rows.along(0))
            self.query = MergedColumnParallelLinear([up])
        self.down = MergedColumnParallelLinear([query, latent])
        self.input_form = self.down.input_form
        self.latent_norm = options.norm.take_weight(weights / "kv_a_layernorm", options.rank), options.norm.eps
        head_dim = options.nope_dim + options.value_dim
        rows = heads.times(head_dim)
        up = Projection(weights / "kv_b_proj", rows.total, options.rank, rows.along(0))
        matrices = weights.method.take_matrix(up).to(self.latent_norm[0].dtype).view(heads.length, head_dim, -1)
        keys, values = matrices.split((options.nope_dim, options.value_dim), dim=1)
        self.absorb = HeadLinear(keys.transpose(1, 2).contiguous())
        self.values = HeadLinear(values.contiguous())
        self.output = RowParallelLinear(weights / "o_proj", heads.times(options.value_dim), hidden_size, parallel)
        self.rotary = context.rotary.table(options.rope)
        self.rows = latent_rows(parallel, options.num_heads)

    @property
    def cache_layer(self) -> LatentLayer:
        return self.rows.layer(self.options.rank, self.options.rope_dim)

    def __call__(self, x: Activation, cache: LayerCache, step: AttentionStep) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]; writes this step's rows to `cache`."""
        options, rotation = self.options, step.rotation(self.rotary)
        query, compressed = self._project(x)
        self._write(compressed, cache, step)
        nope, rope = query.split((options.nope_dim, options.rope_dim), dim=-1)
        rotated = rotate_part(rope, rotation.cos, rotation.sin, interleaved=options.interleaved)
        query = torch.cat((self.absorb(nope), rotated), dim=-1)
        out = self.rows.attend(query, step, cache, options.rank, options.scale)
        return self.output(self.values(out).flatten(1))

    def store(self, x: Activation, cache: LayerCache, step: AttentionStep) -> None:
        """Write the rows of x [T, hidden_size] to `cache`. What queries are made of is computed too and dropped: it
        comes with the rows in one product."""
        self._write(self._compress(x)[1], cache, step)

    def _project(self, x: Activation) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden_size] -> queries [T, heads, nope_dim + rope_dim] and rows [T, rank + rope_dim] of the latent."""
        query, compressed = self._compress(x)
        if self.query is not None and self.query_norm is not None:
            query = self.query(self.query_norm(query.contiguous()))
        return query.unflatten(-1, (self.num_heads, -1)), compressed

    def _compress(self, x: Activation) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden_size] -> what queries are made of, and rows [T, rank + rope_dim] of the latent."""
        projected = self.down(x)
        num_latent = self.options.rank + self.options.rope_dim
        query, compressed = projected.split((projected.shape[1] - num_latent, num_latent), dim=-1)
        return query, compressed

    def _write(self, compressed: torch.Tensor, cache: LayerCache, step: AttentionStep) -> None:
        (rows,) = cache.tensors
        rotation, slots = step.rotation(self.rotary), self.rows.slot_mapping(step, cache)
        interleaved = self.options.interleaved
        cache_latents(compressed, self.latent_norm, rotation.cos, rotation.sin, rows, slots, interleaved=interleaved)


def _whole(weights: Weights, out_features: int, in_features: int) -> Projection:
    return Projection(weights, out_features, in_features, Slice(0, 0, out_features))
