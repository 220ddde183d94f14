"""Attention of a mixed batch (decodes, then prefills and chunks of them) over the paged KV cache, causal.

On a GPU decodes and prefills have a kernel each, so that a decode's result does not depend on who prefills beside it.
Where a token is to have the same bits in both, decodes are prefills of one token.
"""

from dataclasses import dataclass

import torch

from proa_engine.kernels.attention_plan import ReferencePlan, plan_reference
from proa_engine.kernels.decode_attention import decode_attention
from proa_engine.kernels.decode_plan import DecodePlan, plan_decodes
from proa_engine.kernels.paged_attention_reference import paged_attention_reference
from proa_engine.kernels.prefill_attention import prefill_attention


@dataclass(frozen=True, slots=True)
class InvariantPlan:
    """One kernel for all, and a context in one piece: there is nothing to plan."""


AttentionPlan = ReferencePlan | DecodePlan | InvariantPlan


def plan_attention(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    num_decodes: int,
    cache_shape: torch.Size,
    window: int | None,
    *,
    batch_invariant: bool = False,
) -> AttentionPlan:
    """What layers that look `window` tokens back (None: at all) share in a step. `cache_shape` is that of the keys.

    `batch_invariant`: a token is to have the same bits as a decode and in any chunk of any batch, as on a CPU always.
    """
    if seq_lens.is_cpu:
        return plan_reference(query_start_loc, seq_lens, block_table, num_decodes, cache_shape, window)
    if batch_invariant:
        return InvariantPlan()
    return plan_decodes(seq_lens, num_decodes, cache_shape[1], window)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    plan: AttentionPlan,
    *,
    num_decodes: int,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Returns [T, heads, D] for query [T, heads, D] over caches [num_blocks, kv_heads, block_size, D].

    The batch is described as by `AttentionMetadata`; `plan` is of the same batch and window. A token sees itself and
    all before it, `window` in all if given. Slots behind a request's end may hold anything.
    """
    if isinstance(plan, ReferencePlan):
        return paged_attention_reference(query, key_cache, value_cache, plan, scale)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    batch = query_start_loc, seq_lens, block_table, out
    if isinstance(plan, InvariantPlan):
        prefill_attention(query, key_cache, value_cache, *batch, 0, scale, window, batch_invariant=True)
        return out
    if num_decodes:
        decode_attention(query, key_cache, value_cache, seq_lens, block_table, out, plan, scale)
    if num_decodes < seq_lens.shape[0]:
        prefill_attention(query, key_cache, value_cache, *batch, num_decodes, scale, window)
    return out
