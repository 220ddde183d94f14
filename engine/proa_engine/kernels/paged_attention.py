"""Attention of a mixed batch (prefills, chunks of prefills, decodes) over the paged KV cache, causal, in one launch.

Online softmax (Milakov & Gimelshein, 2018; FlashAttention-2, arXiv 2307.08691) over tiles of TILE tokens, in float32.
A program computes BLOCK_Q query tokens of one request for all query heads of one KV head, so that K and V are read once
a group. Its tile's rows are (query, head in group) pairs. Grid: (num_tokens // BLOCK_Q + num_requests, kv_heads), an
upper bound that needs no lengths on the host; programs find their request by binary search and the rest leave.
"""

import torch
import triton
import triton.language as tl

from proa_engine.kernels.attention_plan import ReferencePlan, plan_reference
from proa_engine.kernels.paged_attention_reference import paged_attention_reference

LOG2_E = 1.4426950408889634


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    max_query_len: int,
    num_decodes: int,
    scale: float,
    window: int | None = None,
    plan: ReferencePlan | None = None,
) -> torch.Tensor:
    """Returns [T, heads, D] for query [T, heads, D] over caches [num_blocks, kv_heads, block_size, D].

    The batch is described as by `AttentionMetadata`. A token sees itself and all before it, `window` in all if given.
    `plan` spares the CPU to make its own; it must be of the same batch and window. Slots behind a request's end may
    hold anything.
    """
    if query.is_cuda:
        return _paged_attention_triton(
            query, key_cache, value_cache, query_start_loc, seq_lens, block_table, max_query_len, scale, window
        )
    if plan is None:
        plan = plan_reference(query_start_loc, seq_lens, block_table, num_decodes, key_cache.shape, window)
    return paged_attention_reference(query, key_cache, value_cache, plan, scale)


def _paged_attention_triton(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_query_len: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    num_tokens, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    group = num_heads // num_kv_heads
    assert query.stride(-1) == 1
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    # tl.dot wants 16 rows; prompts fill larger tiles, decodes have `group` rows each.
    block_m = max(16 if max_query_len == 1 else 64, triton.next_power_of_2(group))
    block_q = block_m // group
    num_requests = seq_lens.shape[0]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    paged_attention_kernel[(num_tokens // block_q + num_requests, num_kv_heads)](
        query,
        key_cache,
        value_cache,
        out,
        query_start_loc,
        seq_lens,
        block_table,
        num_requests,
        scale * LOG2_E,
        query.stride(0),
        query.stride(1),
        block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        BLOCK_M=block_m,
        BLOCK_Q=block_q,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        TILE=32,
        num_warps=4,
    )
    return out


@triton.jit
def find_request(query_start_loc_ptr, block, num_requests, BLOCK_Q: tl.constexpr):
    """The request of query block `block`: those of request r are numbered from query_start_loc[r] // BLOCK_Q + r on."""
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc_ptr + middle) // BLOCK_Q + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def paged_attention_kernel(
    query_ptr,  # [num_tokens, num_kv_heads * GROUP, HEAD_DIM]
    key_cache_ptr,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    value_cache_ptr,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    out_ptr,  # [num_tokens, num_kv_heads * GROUP, HEAD_DIM]
    query_start_loc_ptr,  # [num_requests + 1]
    seq_lens_ptr,  # [num_requests]
    block_table_ptr,  # [num_requests, max_blocks]
    num_requests,
    scale_log2,  # scale * log2(e): the softmax is computed with powers of 2
    stride_query_token,
    stride_query_head,
    stride_table_request,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: no window
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
):
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = find_request(query_start_loc_ptr, block, num_requests, BLOCK_Q)
    start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - start
    first_query = (block - start // BLOCK_Q - request) * BLOCK_Q
    if first_query >= query_len:  # the grid is an upper bound
        return
    seq_len = tl.load(seq_lens_ptr + request)
    context_len = seq_len - query_len

    row = tl.arange(0, BLOCK_M)
    query_index = first_query + row // GROUP
    row_mask = (row < BLOCK_Q * GROUP) & (query_index < query_len)
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, BLOCK_D)
    dim_mask = dim < HEAD_DIM
    token = (start + query_index).to(tl.int64)
    # [BLOCK_M, BLOCK_D]
    query = tl.load(
        query_ptr + (token * stride_query_token + head * stride_query_head)[:, None] + dim[None, :],
        mask=row_mask[:, None] & dim_mask[None, :],
        other=0.0,
    )
    position = context_len + query_index

    last_query = tl.minimum(first_query + BLOCK_Q, query_len) - 1
    tile_end = context_len + last_query + 1
    tile_start = 0
    if WINDOW > 0:
        tile_start = tl.maximum(context_len + first_query - WINDOW + 1, 0) // TILE * TILE

    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for tile in range(tile_start, tile_end, TILE):
        key_position = tile + tl.arange(0, TILE)
        key_mask = key_position < tile_end
        physical = tl.load(
            block_table_ptr + request.to(tl.int64) * stride_table_request + key_position // BLOCK_SIZE,
            mask=key_mask,
            other=0,
        ).to(tl.int64)
        place = ((physical * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + key_position % BLOCK_SIZE) * HEAD_DIM
        kv_mask = key_mask[:, None] & dim_mask[None, :]
        # [TILE, BLOCK_D]; what lies behind the end reads as zero, for it may be NaN
        key = tl.load(key_cache_ptr + place[:, None] + dim[None, :], mask=kv_mask, other=0.0)
        value = tl.load(value_cache_ptr + place[:, None] + dim[None, :], mask=kv_mask, other=0.0)
        # [BLOCK_M, TILE]
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
        visible = key_position[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (key_position[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        # A row that has seen nothing yet: -inf - -inf would be NaN.
        safe_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        probabilities = tl.exp2(scores - safe_maximum[:, None])
        rescale = tl.exp2(maximum - safe_maximum)
        total = total * rescale + tl.sum(probabilities, axis=1)
        acc = acc * rescale[:, None]
        acc += tl.dot(probabilities.to(value.dtype), value, input_precision="ieee")
        maximum = new_maximum

    total = tl.where(total == 0.0, 1.0, total)  # rows outside of the tile
    tl.store(
        out_ptr + ((token * NUM_KV_HEADS * GROUP + head) * HEAD_DIM)[:, None] + dim[None, :],
        acc / total[:, None],
        mask=row_mask[:, None] & dim_mask[None, :],
    )
