"""The attention layer: projections, optional q/k norm, rotation, KV cache and the attention over it.

Heads are cut over ranks, KV heads with them.
"""

from dataclasses import dataclass, field

import torch

from proa_engine.kernels.attention_plan import ReferencePlan, plan_reference
from proa_engine.kernels.paged_attention import paged_attention
from proa_engine.kernels.reshape_and_cache import CacheRows, cache_rows, reshape_and_cache
from proa_engine.kernels.rotary import rotary
from proa_engine.layers.attention_metadata import AttentionMetadata
from proa_engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from proa_engine.layers.norm import RMSNorm
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Weights


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What differs between architectures."""

    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm_eps: float | None = None  # set: q and k are normalised by head, before the rotation
    window: int | None = None  # tokens that a token sees, itself included; None: all before it


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """One step's batch as attention layers read it: made once, used by all layers."""

    metadata: AttentionMetadata
    cos: torch.Tensor  # [T, head_dim], of `RotaryTable`
    sin: torch.Tensor
    # What a CPU works out once a step. On a GPU: nothing.
    rows: CacheRows | None = None
    plans: dict[int | None, ReferencePlan] = field(default_factory=dict)  # by window


def plan_step(
    metadata: AttentionMetadata,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: torch.Tensor,
    windows: set[int | None],
) -> AttentionStep:
    """`kv_cache` is any layer's: only its shape and device count."""
    if kv_cache.is_cuda:
        return AttentionStep(metadata, cos, sin)
    shape = kv_cache.shape[1:]
    plans = {
        window: plan_reference(
            metadata.query_start_loc, metadata.seq_lens, metadata.block_table, metadata.num_decodes, shape, window
        )
        for window in windows
    }
    return AttentionStep(metadata, cos, sin, cache_rows(metadata.slot_mapping, shape), plans)


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
        self.q_norm = self.k_norm = None
        if options.qk_norm_eps is not None:
            self.q_norm = RMSNorm(weights / "q_norm", head_dim, options.qk_norm_eps)
            self.k_norm = RMSNorm(weights / "k_norm", head_dim, options.qk_norm_eps)

    def __call__(self, x: torch.Tensor, kv_cache: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]; writes this step's keys and values to `kv_cache`."""
        metadata = step.metadata
        query, key, value = self._project(x, step.cos, step.sin)
        key_cache, value_cache = kv_cache.unbind()
        reshape_and_cache(key, value, key_cache, value_cache, metadata.slot_mapping, step.rows)
        out = paged_attention(
            query,
            key_cache,
            value_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            max_query_len=metadata.max_query_len,
            num_decodes=metadata.num_decodes,
            scale=self.head_dim**-0.5,
            window=self.window,
            plan=step.plans.get(self.window),
        )
        return self.output(out.flatten(1))

    def _project(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries and keys, and values: [T, heads, head_dim] each."""
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        num_rotated = self.num_heads + self.num_kv_heads
        if self.q_norm is None or self.k_norm is None:
            rotated = rotary(heads[:, :num_rotated], cos, sin)
            return rotated[:, : self.num_heads], rotated[:, self.num_heads :], heads[:, num_rotated:]
        query = rotary(self.q_norm(heads[:, : self.num_heads]), cos, sin)
        key = rotary(self.k_norm(heads[:, self.num_heads : num_rotated]), cos, sin)
        return query, key, heads[:, num_rotated:]
