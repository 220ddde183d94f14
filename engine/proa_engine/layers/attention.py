"""The attention layer: projections, optional q/k norm, rotation, KV cache write, paged attention.

Query heads and KV heads are sharded over ranks.
"""

from dataclasses import dataclass, field

import torch

from proa_engine.kernels.activation import Activation
from proa_engine.kernels.cache_rows import CacheRows, cache_rows
from proa_engine.kernels.fp8 import FP8
from proa_engine.kernels.paged_attention import AttentionPlan, paged_attention, plan_attention
from proa_engine.kernels.rotate_and_cache import rotate_and_cache
from proa_engine.layers.attention_metadata import AttentionMetadata
from proa_engine.layers.cache_layers import KeyValueLayer, LayerCache
from proa_engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Weights


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Differences between architectures."""

    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm_eps: float | None = None  # set: q and k are normalised by head, before the rotation
    window: int | None = None  # tokens that a token attends to, itself included; None: all before it


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What attention layers of one step share. `plan` and `cache_rows` compute at the first layer that needs them."""

    metadata: AttentionMetadata
    cos: torch.Tensor  # [T, head_dim], of `RotaryTable`
    sin: torch.Tensor
    batch_invariant: bool
    _plans: dict[tuple[int, int | None, int], AttentionPlan] = field(default_factory=dict)
    _rows: dict[tuple[int, int], CacheRows] = field(default_factory=dict)

    def plan(self, cache: LayerCache, window: int | None) -> AttentionPlan:
        """The plan of layers with this block table, window and number of KV heads.

        On a GPU a plan holds nothing of the table, so tables share it.
        """
        keys = cache.tensors[0]
        key = (cache.table if keys.is_cpu else 0, window, keys.shape[1])
        plan = self._plans.get(key)
        if plan is None:
            metadata = self.metadata
            plan = self._plans[key] = plan_attention(
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.tables[cache.table].block_table,
                metadata.num_decodes,
                keys.shape,
                window,
                decode_width=metadata.decode_width,
                batch_invariant=self.batch_invariant,
                slot_mapping=metadata.tables[cache.table].slot_mapping,
            )
        return plan

    def cache_rows(self, cache: LayerCache) -> CacheRows | None:
        """Where layers with this block table and number of KV heads write; None on a GPU, which needs only slots."""
        keys = cache.tensors[0]
        if not keys.is_cpu:
            return None
        key = cache.table, keys.shape[1]
        rows = self._rows.get(key)
        if rows is None:
            rows = self._rows[key] = cache_rows(self.metadata.tables[cache.table].slot_mapping, keys.shape)
        return rows


class Attention:
    def __init__(
        self,
        weights: Weights,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        parallel: ParallelContext,
        options: AttentionOptions,
    ) -> None:
        self.num_heads = parallel.share(num_heads, "number of attention heads")
        self.num_kv_heads = parallel.share(num_kv_heads, "number of KV heads")
        self.head_dim = head_dim
        self.window = options.window
        widths = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        names = ("q_proj", "k_proj", "v_proj")
        self.qkv = MergedColumnParallelLinear(weights, names, hidden_size, widths, parallel, bias=options.qkv_bias)
        self.output = RowParallelLinear(
            weights / "o_proj", num_heads * head_dim, hidden_size, parallel, bias=options.output_bias
        )
        self.norms: tuple[torch.Tensor, torch.Tensor, float] | None = None
        if options.qk_norm_eps is not None:
            q_weight = (weights / "q_norm").take("weight", (head_dim,))
            k_weight = (weights / "k_norm").take("weight", (head_dim,))
            self.norms = q_weight, k_weight, options.qk_norm_eps
        self.cache_scales = _cache_scale(weights, "k_scale"), _cache_scale(weights, "v_scale")

    @property
    def cache_layer(self) -> KeyValueLayer:
        return KeyValueLayer(self.num_kv_heads, self.head_dim, self.window)

    def __call__(self, x: Activation, cache: LayerCache, step: AttentionStep) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]; writes this step's keys and values to `cache`."""
        metadata = step.metadata
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        key_cache, value_cache = cache.tensors
        table = metadata.tables[cache.table]
        scales = self.cache_scales if key_cache.dtype == FP8 else (1.0, 1.0)
        query = rotate_and_cache(
            heads,
            self.norms,
            step.cos,
            step.sin,
            key_cache,
            value_cache,
            table.slot_mapping,
            step.cache_rows(cache),
            scales,
        )
        out = paged_attention(
            query,
            key_cache,
            value_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            table.block_table,
            step.plan(cache, self.window),
            num_decodes=metadata.num_decodes,
            scale=self.head_dim**-0.5 * scales[0],
            window=self.window,
        )
        if scales[1] != 1.0:
            out = out.mul_(scales[1])
        return self.output(out.flatten(1))


def _cache_scale(weights: Weights, name: str) -> float:
    """The checkpoint's scale for a KV cache of 8-bit floats, 1.0 if it has none."""
    return weights.take(name, (1,), dtype=torch.float32).item() if weights.has(name) else 1.0
