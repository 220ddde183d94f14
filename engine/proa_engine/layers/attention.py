"""The attention layer: projections, optional q/k norm, rotation, KV cache write, paged attention.

Query heads and KV heads are sharded over ranks.
"""

from dataclasses import dataclass

import torch

from proa_engine.kernels.activation import Activation
from proa_engine.kernels.cache_rows import CacheRows, cache_rows
from proa_engine.kernels.fp8 import FP8
from proa_engine.kernels.paged_attention import AttentionPlan, paged_attention, plan_attention
from proa_engine.kernels.rotate_and_cache import rotate_and_cache
from proa_engine.layers.attention_metadata import AttentionMetadata
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
    """What all attention layers of one step share."""

    metadata: AttentionMetadata
    cos: torch.Tensor  # [T, head_dim], of `RotaryTable`
    sin: torch.Tensor
    plans: dict[int | None, AttentionPlan]  # by window
    rows: CacheRows | None  # set on a CPU only


def plan_step(
    metadata: AttentionMetadata,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: torch.Tensor,
    windows: set[int | None],
    *,
    batch_invariant: bool,
) -> AttentionStep:
    """Compute what the layers share. `kv_cache` is that of any layer: only its shape and device are used."""
    shape = kv_cache.shape[1:]
    plans = {
        window: plan_attention(
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            metadata.num_decodes,
            shape,
            window,
            decode_width=metadata.decode_width,
            batch_invariant=batch_invariant,
        )
        for window in windows
    }
    rows = cache_rows(metadata.slot_mapping, shape) if kv_cache.is_cpu else None
    return AttentionStep(metadata, cos, sin, plans, rows)


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

    def __call__(self, x: Activation, kv_cache: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]; writes this step's keys and values to `kv_cache`."""
        metadata = step.metadata
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        key_cache, value_cache = kv_cache.unbind()
        scales = self.cache_scales if kv_cache.dtype == FP8 else (1.0, 1.0)
        query = rotate_and_cache(
            heads, self.norms, step.cos, step.sin, key_cache, value_cache, metadata.slot_mapping, step.rows, scales
        )
        out = paged_attention(
            query,
            key_cache,
            value_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            step.plans[self.window],
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
