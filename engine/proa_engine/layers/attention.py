"""The attention layer: projections, optional q/k norm, rotation, KV cache write, paged attention.

Query heads and KV heads are sharded over ranks; a KV head is on several ranks if there are fewer KV heads than ranks.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from proa_engine.kernels.attention.paged_attention import paged_attention
from proa_engine.kernels.attention.rotate_and_cache import rotate_and_cache
from proa_engine.kernels.attention.store_kv import CacheRows
from proa_engine.kernels.fp8 import FP8
from proa_engine.kernels.products.skinny_gemm import Activation
from proa_engine.kernels.sigmoid_gate import scale_by_sigmoid
from proa_engine.layers.attention_metadata import AttentionStep
from proa_engine.layers.cache_layers import KeyValueLayer, LayerCache
from proa_engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear, column_projections
from proa_engine.layers.norm import NormOptions, ShardedNorm
from proa_engine.layers.parallel import LayerContext, ParallelContext
from proa_engine.layers.rotary import RopeConfig, Rotation
from proa_engine.layers.shares import HeadShares, share_heads
from proa_engine.layers.weights import Projection, Slice, Weights


@dataclass(frozen=True, slots=True)
class QkNorm:
    """q and k are normalised before the rotation."""

    norm: NormOptions
    whole: bool = False  # over all heads together; else each head by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """One layer's sizes, before sharding, and how it differs from a plain one."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    window: int | None = None  # tokens that a token attends to, itself included; None: all before it
    scale: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    soft_cap: float | None = None  # c: a score s becomes c * tanh(s / c)
    sinks: bool = False  # each head has a score without a key, which only adds to the sum of the softmax
    qkv_bias: bool = False
    key_bias: bool = True  # False: with `qkv_bias`, queries and values alone have a bias
    output_bias: bool = False
    qk_norm: QkNorm | None = None
    norm_values: bool = False  # values are normalised as q and k, without weights
    values_are_keys: bool = False  # there is no v_proj: values are the keys before their norm and rotation
    only_reads: bool = False  # it has no keys and values of its own, but reads the cache of an earlier layer
    within_images: bool = True  # tokens of images attend to all of their image, where the model's do
    causal: bool = True  # False: a token also attends to those behind it among the step's tokens of its request
    output_gate: bool = False  # q_proj has for each head its query, then the gate of its output
    stored_merged: bool = False  # the checkpoint has one matrix qkv_proj
    stored_by_groups: bool = False  # this has, for each KV head, the rows of its query heads, its key and its value
    input_size: int | None = None  # values of a token that the projections of q, k and v read; None: hidden_size

    @property
    def cache_kind(self) -> type[KeyValueLayer]:
        return KeyValueLayer

    def num_parameters(self, hidden_size: int) -> int:
        q_heads = (1 + self.output_gate) * self.num_heads
        kv_heads = 0 if self.only_reads else (2 - self.values_are_keys) * self.num_kv_heads
        inputs = (self.input_size or hidden_size) * (q_heads + kv_heads)
        return self.head_dim * (inputs + hidden_size * self.num_heads)

    def num_copied(self, hidden_size: int, num_ranks: int) -> int:
        shares = share_heads(self.num_heads, self.num_kv_heads, 0, num_ranks, "attention heads")
        largest = replace(self, num_heads=shares.heads.length, num_kv_heads=shares.shared.length)
        return largest.num_parameters(hidden_size) - self.num_parameters(hidden_size) // num_ranks

    def make(self, weights: Weights, context: LayerContext) -> "Attention":
        return Attention(weights / "self_attn", context, self)

    def shares(self, parallel: ParallelContext) -> HeadShares:
        """This rank's query heads, and the KV heads that they use."""
        return parallel.heads(self.num_heads, self.num_kv_heads, "attention heads")

    def projections(self, weights: Weights, context: LayerContext) -> list[Projection]:
        """This rank's rows of q, k and v, and of the output's gate."""
        input_size, shares = self.input_size or context.hidden_size, self.shares(context.parallel)
        if self.stored_by_groups:
            return self._rows_of_groups(weights / "qkv_proj", input_size, shares)
        q, kv = shares.heads.times(self.head_dim), shares.shared.times(self.head_dim)
        if not self.output_gate:
            stored_as = "qkv_proj" if self.stored_merged else None
            count = 1 if self.only_reads else 2 if self.values_are_keys else 3
            return column_projections(
                weights, ("q_proj", "k_proj", "v_proj")[:count], input_size, (q, kv, kv)[:count], stored_as
            )
        starts = range(2 * q.start, 2 * (q.start + q.length), 2 * self.head_dim)
        query, gate = (
            [
                Projection(weights / "q_proj", 2 * q.total, input_size, Slice(0, start + offset, self.head_dim))
                for start in starts
            ]
            for offset in (0, self.head_dim)
        )
        return [*query, *column_projections(weights, ("k_proj", "v_proj"), input_size, (kv, kv)), *gate]

    def _rows_of_groups(self, weights: Weights, input_size: int, shares: HeadShares) -> list[Projection]:
        group = self.num_heads // self.num_kv_heads
        total = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        queries = [head + 2 * (head // group) for head in shares.heads.numbers]
        keys = [(head + 1) * (group + 2) - 2 for head in shares.shared.numbers]
        places = (*queries, *keys, *(key + 1 for key in keys))
        return [
            Projection(weights, total, input_size, Slice(0, place * self.head_dim, self.head_dim)) for place in places
        ]


class Attention:
    def __init__(self, weights: Weights, context: LayerContext, options: AttentionOptions) -> None:
        parallel, head_dim = context.parallel, options.head_dim
        shares = options.shares(parallel)
        self.num_heads, self.num_kv_heads = shares.heads.length, shares.shared.length
        self.head_dim = head_dim
        self.window = options.window
        self.scale = head_dim**-0.5 if options.scale is None else options.scale
        projections = options.projections(weights, context)
        without = () if options.key_bias else [each for each in projections if each.weights.prefix.endswith("k_proj")]
        self.qkv = MergedColumnParallelLinear(projections, bias=options.qkv_bias, without_bias=without)
        self.input_form = self.qkv.input_form
        self.output = RowParallelLinear(
            weights / "o_proj", shares.heads.times(head_dim), context.hidden_size, parallel, bias=options.output_bias
        )
        self.soft_cap = options.soft_cap
        self.sinks: torch.Tensor | None = None
        if options.sinks:
            self.sinks = weights.take("sinks", (options.num_heads,), shares.heads.along(0), torch.float32)
        self.interleaved = options.rope.interleaved
        self.gate_size = self.num_heads * head_dim if options.output_gate else 0
        self.rotary = context.rotary.table(options.rope)
        self.norms: tuple[torch.Tensor, torch.Tensor, float] | None = None  # of each head
        self.whole_norms: tuple[ShardedNorm, ShardedNorm] | None = None
        if options.qk_norm is not None and options.qk_norm.whole:
            self.whole_norms = (
                ShardedNorm(weights / "q_norm", shares.heads.times(head_dim), options.qk_norm.norm, parallel),
                ShardedNorm(weights / "k_norm", shares.shared.times(head_dim), options.qk_norm.norm, parallel),
            )
        elif options.qk_norm is not None:
            norm = options.qk_norm.norm
            q_weight = norm.take_weight(weights / "q_norm", head_dim)
            has_keys = not options.only_reads
            k_weight = norm.take_weight(weights / "k_norm", head_dim) if has_keys else q_weight
            self.norms = q_weight, k_weight, norm.eps
        self.norm_values = options.norm_values
        self.values_are_keys = options.values_are_keys and not options.only_reads
        self.only_reads, self.causal = options.only_reads, options.causal
        self.within_images = options.within_images
        if self.only_reads:
            for name in ("k_proj", "v_proj", "k_norm", "v_norm"):  # checkpoints have them all the same
                (weights / name).leave()
        self.cache_scales = _cache_scale(weights, "k"), _cache_scale(weights, "v")
        self.following = self.output.matrices  # and what a decoder's layer multiplies by next, see `paged_attention`

    @property
    def cache_layer(self) -> KeyValueLayer:
        """What it caches, or reads of the earlier layer."""
        return KeyValueLayer(self.num_kv_heads, self.head_dim, self.window)

    def __call__(self, x: Activation, cache: LayerCache, step: AttentionStep) -> torch.Tensor:
        """x [T, `input_size`] -> [T, hidden_size]; writes this step's keys and values to `cache`."""
        metadata = step.metadata
        inputs = step.inputs(cache, self.rotary, self.window, causal=self.causal, within_images=self.within_images)
        rows, written = inputs.rows, cache
        if self.only_reads:
            written = _without_heads(cache)
            rows = step.cache_rows(written)
        query, gate = self._write(x, written, inputs.table.slot_mapping, inputs.rotation, rows)
        scales, (key_cache, value_cache) = self._scales(cache), cache.tensors
        out = paged_attention(
            query,
            key_cache,
            value_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            inputs.table.block_table,
            inputs.plan,
            num_decodes=metadata.num_decodes,
            scale=self.scale * scales[0],
            window=self.window,
            sinks=self.sinks,
            soft_cap=self.soft_cap,
            ends=inputs.ends,
            following=self.following,
        )
        if scales[1] != 1.0:
            out = out.mul_(scales[1])
        out = out.flatten(1)
        if gate is not None:
            out = scale_by_sigmoid(out, gate)
        return self.output(out)

    def store(self, x: Activation, cache: LayerCache, step: AttentionStep) -> None:
        """Write the keys and values of x [T, `input_size`] to `cache`. Queries are computed too and dropped: they come
        with keys and values in one product."""
        slots = step.metadata.tables[cache.table].slot_mapping
        self._write(x, cache, slots, step.rotation(self.rotary), step.cache_rows(cache))

    def _write(
        self, x: Activation, cache: LayerCache, slots: torch.Tensor, rotation: Rotation, rows: CacheRows | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return rotated queries [T, heads, head_dim] and what the output's gate is computed from, if it has one."""
        (key_cache, value_cache), qkv, gate = cache.tensors, self.qkv(x), None
        if self.gate_size:
            qkv, gate = qkv[:, : -self.gate_size], qkv[:, -self.gate_size :]
        if self.whole_norms is not None:
            qkv = self._with_norms(qkv, *self.whole_norms)
        if self.values_are_keys:
            qkv = torch.cat((qkv, qkv[:, -self.num_kv_heads * self.head_dim :]), dim=-1)
        query = rotate_and_cache(
            qkv.view(qkv.shape[0], -1, self.head_dim),
            self.norms,
            rotation.cos,
            rotation.sin,
            key_cache,
            value_cache,
            slots,
            rows,
            self._scales(cache),
            interleaved=self.interleaved,
            norm_values=self.norm_values,
        )
        if rotation.query_scale is not None:
            query = query.mul_(rotation.query_scale)
        return query, gate

    def _scales(self, cache: LayerCache) -> tuple[float, float]:
        return self.cache_scales if cache.tensors[0].dtype == FP8 else (1.0, 1.0)

    def _with_norms(self, qkv: torch.Tensor, q_norm: ShardedNorm, k_norm: ShardedNorm) -> torch.Tensor:
        kv_size = self.num_kv_heads * self.head_dim
        query, key, value = qkv.split((self.num_heads * self.head_dim, kv_size, kv_size), dim=-1)
        return torch.cat((q_norm(query), k_norm(key), value), dim=-1)


def _without_heads(cache: LayerCache) -> LayerCache:
    """The cache as one of no KV heads, into which nothing is written."""
    return LayerCache(cache.table, tuple(tensor[:, :0] for tensor in cache.tensors))


def _cache_scale(weights: Weights, of: Literal["k", "v"]) -> float:
    """The checkpoint's scale for a KV cache of 8-bit floats, 1.0 if it has none. ModelOpt stores it with the
    projection."""
    for place in (weights, weights / f"{of}_proj"):
        if place.has(f"{of}_scale"):
            return place.take(f"{of}_scale", (1,), dtype=torch.float32).item()
    return 1.0
