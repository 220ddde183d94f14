"""Causal paged attention (Kwon et al. 2023) of a mixed batch: decodes first, then prompts and chunks of prompts.

On a GPU decodes and prefills have separate kernels, so that a decode's result does not depend on the prefills of its
batch. In batch-invariant mode decodes are computed as prefills of one token. Hopper has a kernel of its own for most
prefills.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch

from proa_engine.kernels.attention.attention_plan import ReferencePlan, plan_reference
from proa_engine.kernels.attention.decode_attention import decode_attention
from proa_engine.kernels.attention.decode_plan import DecodePlan, plan_decodes
from proa_engine.kernels.attention.paged_attention_reference import paged_attention_reference
from proa_engine.kernels.attention.prefill_attention import prefill_attention
from proa_engine.kernels.launch import is_hopper


@dataclass(frozen=True, slots=True)
class InvariantPlan:
    """The plan of batch-invariant attention: one kernel computes every row and splits no context."""

    slot_mapping: torch.Tensor | None = None  # [T] int64, if decodes may have padding


AttentionPlan = ReferencePlan | DecodePlan | InvariantPlan


def plan_attention(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    num_decodes: int,
    cache_shape: torch.Size,
    window: int | None,
    *,
    decode_width: int = 1,
    batch_invariant: bool = False,
    slot_mapping: torch.Tensor | None = None,
    block_stride: int | None = None,
    ends: torch.Tensor | None = None,
    causal: bool = True,
) -> AttentionPlan:
    """Plan a step for the layers with this window (in tokens; None: no window).

    `cache_shape` is that of the keys, [num_blocks, kv_heads, block_size, D]. `batch_invariant`: a token has the same
    bits as a decode and in any chunk of any batch. On a CPU it always has, and computes wider decodes as prefills.
    `slot_mapping` [T] int64 is needed if wider decodes have a window: keys before the first token with a slot may be
    gone. `block_stride`: elements from one block of a cache to the next; None: it is contiguous. `ends`: as for
    `paged_attention`. Not `causal`: all tokens of a request attend to its last one, in batches of decodes, without a
    window and whatever `batch_invariant` says.
    """
    assert causal or (not window and num_decodes == seq_lens.shape[0])
    slot_mapping = None if decode_width == 1 else slot_mapping
    if seq_lens.is_cpu:
        if not causal:
            ends = seq_lens.repeat_interleave(query_start_loc.diff())
        return plan_reference(
            query_start_loc, seq_lens, block_table, cache_shape, window, slot_mapping, block_stride, ends
        )
    if batch_invariant and causal:
        return InvariantPlan(slot_mapping)
    return plan_decodes(seq_lens, num_decodes, cache_shape[1], window, decode_width, slot_mapping, causal=causal)


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
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
    ends: torch.Tensor | None = None,
    following: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """query [T, heads, D], caches [num_blocks, kv_heads, block_size, D] -> [T, heads, D]

    Both caches have the same strides, of any size between blocks and contiguous in a block.

    The other arguments describe the batch as `AttentionMetadata` does; `plan` is from `plan_attention` for this batch
    and window. A token attends to itself and the tokens before it, at most `window` in all. Cache slots behind a
    request's last token and before its first query token's window may hold anything, and the entries of their blocks in
    the table are not read.

    `sinks` [heads] are scores without a key, which only add to the sum of the softmax (gpt-oss). `soft_cap` c replaces
    a score s by c * tanh(s / c) before the softmax (Gemma 2).

    `ends` [T] int32, of which None stands for each token's own position + 1: a token attends to those of its window
    and those behind itself, up to this position of its request (Gemma 3's images). Decodes end with themselves.

    `following`: the weights of the layer's next products, in their order, for `PROA_L2_PREFETCH`
    (`kernels/prefetch.py`).
    """
    if isinstance(plan, ReferencePlan):
        return paged_attention_reference(query, key_cache, value_cache, plan, scale, sinks, soft_cap)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    batch = query_start_loc, seq_lens, block_table, out
    if isinstance(plan, InvariantPlan):
        prefill_attention(
            query,
            key_cache,
            value_cache,
            *batch,
            0,
            scale,
            window,
            sinks=sinks,
            soft_cap=soft_cap,
            batch_invariant=True,
            slot_mapping=plan.slot_mapping,
            ends=ends,
        )
        return out
    if num_decodes:
        decode_attention(
            query,
            key_cache,
            value_cache,
            block_table,
            out,
            plan,
            scale,
            sinks=sinks,
            soft_cap=soft_cap,
            following=following,
        )
    if num_decodes == seq_lens.shape[0]:
        return out
    hopper = _prefill_hopper() if ends is None and soft_cap is None and is_hopper(query.device) else None
    if hopper is not None and hopper.suits(query, key_cache):
        hopper.prefill_hopper(query, key_cache, value_cache, *batch, num_decodes, scale, window, sinks=sinks)
    else:
        prefill_attention(
            query, key_cache, value_cache, *batch, num_decodes, scale, window, sinks=sinks, soft_cap=soft_cap, ends=ends
        )
    return out


@cache
def _prefill_hopper() -> ModuleType | None:
    """The module of this name; None if Triton has no Gluon, which is experimental, or one that lacks what it needs."""
    try:
        from proa_engine.kernels.attention import prefill_hopper
    except (ImportError, AttributeError) as error:
        logging.getLogger(__name__).warning("attention of prompts will be slower, without Triton's Gluon: %s", error)
        return None
    return prefill_hopper
