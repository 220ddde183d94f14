"""Paged attention over latent rows: every head attends to the same rows, whose first values are also the values.

With the up-projections absorbed into the queries and the outputs (DeepSeek-V2, arXiv 2405.04434, section 2.1.2), this
is attention with one KV head. On a GPU a program computes `GROUP` heads, so that a row is read once for them; decodes
and prefills have separate kernels, as in `paged_attention`.
"""

import torch

from proa_engine.kernels.attention_plan import ReferencePlan
from proa_engine.kernels.attention_tile import LOG2_E
from proa_engine.kernels.decode_plan import DecodePlan
from proa_engine.kernels.latent_decode import latent_decode_kernel
from proa_engine.kernels.latent_prefill import latent_prefill_kernel
from proa_engine.kernels.paged_attention import AttentionPlan, InvariantPlan
from proa_engine.kernels.paged_attention_reference import paged_attention_reference
from proa_engine.kernels.sizes import next_power_of_2

GROUP = 16  # heads of a program: the rows of tl.dot
QUERIES = 2  # tokens of a prefill's program: float32 sums of as many rows stay in registers


def head_groups(num_heads: int) -> int:
    """Programs for each row of a decode: what `plan_attention` takes as the number of KV heads on a GPU."""
    return -(-num_heads // GROUP)


def latent_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    rank: int,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    plan: AttentionPlan,
    *,
    num_decodes: int,
    scale: float,
) -> torch.Tensor:
    """query [T, heads, rank + rope_dim], cache [num_blocks, block_size, rank + rope_dim] -> [T, heads, rank]

    The other arguments describe the batch as those of `paged_attention` do.
    """
    if isinstance(plan, ReferencePlan):
        rows = cache[:, None]
        return paged_attention_reference(query, rows, rows, plan, scale)[..., :rank]
    out = torch.empty(*query.shape[:2], rank, dtype=query.dtype, device=query.device)
    if isinstance(plan, InvariantPlan):
        _prefill(query, cache, query_start_loc, seq_lens, block_table, out, 0, scale)
        return out
    if num_decodes:
        _decode(query, cache, seq_lens, block_table, out, plan, scale)
    if num_decodes < seq_lens.shape[0]:
        _prefill(query, cache, query_start_loc, seq_lens, block_table, out, num_decodes, scale)
    return out


def _decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    plan: DecodePlan,
    scale: float,
) -> None:
    """Write rows 0 … plan.num_rows * plan.width of out [T, heads, rank]. Zeros for padding."""
    _, num_heads, rank = out.shape
    assert query.is_contiguous()
    assert cache.is_contiguous()
    max_items, groups = plan.item_row.numel(), head_groups(num_heads)
    latent_decode_kernel[(max_items, groups, plan.width)](
        query,
        cache,
        out,
        torch.empty(max_items, plan.width, num_heads, rank, dtype=torch.float32, device=query.device),
        torch.empty(2, max_items, plan.width, num_heads, dtype=torch.float32, device=query.device),
        seq_lens,
        block_table,
        plan.item_row,
        plan.first_item,
        plan.split_length,
        plan.arrived,
        max_items,
        scale * LOG2_E,
        block_table.stride(0),
        WIDTH=plan.width,
        TILE=32,
        num_warps=4,
        num_stages=5,  # two for the block table, three for rows: one tile of them is in flight
        **_constants(query, cache, rank),
    )


def _prefill(
    query: torch.Tensor,
    cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    num_decodes: int,
    scale: float,
) -> None:
    """Write out [T, heads, rank] of all requests behind the first `num_decodes`."""
    num_tokens, num_heads, rank = out.shape
    assert query.is_contiguous()
    assert cache.is_contiguous()
    num_requests = seq_lens.shape[0] - num_decodes
    latent_prefill_kernel[((num_tokens - num_decodes) // QUERIES + num_requests, head_groups(num_heads))](
        query,
        cache,
        out,
        query_start_loc,
        seq_lens,
        block_table,
        num_decodes,
        num_requests,
        scale * LOG2_E,
        block_table.stride(0),
        QUERIES=QUERIES,
        TILE=32,
        num_warps=8,
        num_stages=5,  # two for the block table, three for rows: one tile of them is in flight
        **_constants(query, cache, rank),
    )


def _constants(query: torch.Tensor, cache: torch.Tensor, rank: int) -> dict[str, int]:
    rope_dim = query.shape[2] - rank
    return {
        "NUM_HEADS": query.shape[1],
        "GROUP": GROUP,
        "RANK": rank,
        "ROPE_DIM": rope_dim,
        "BLOCK_SIZE": cache.shape[1],
        "BLOCK_RANK": max(16, next_power_of_2(rank)),
        "BLOCK_ROPE": max(16, next_power_of_2(rope_dim)),
    }
