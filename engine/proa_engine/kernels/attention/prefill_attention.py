"""Causal paged attention of prompts and chunks of prompts (FlashAttention-2 tiling), all requests in one launch.

A program computes BLOCK_Q query tokens of one request for all query heads of one KV head, so that K and V are read once
for the group. The rows of its tile are (query, head in group) pairs. Grid: (num_tokens // BLOCK_Q + num_requests) *
kv_heads, an upper bound that needs no lengths on the host; programs find their request by binary search, and those
without work return.
"""

import torch
import triton
import triton.language as tl

from proa_engine.kernels.attention.attention_tile import attend_tile, first_state, score_factors, store_rows
from proa_engine.kernels.attention.store_kv import block_stride
from proa_engine.kernels.launch import kernel, next_power_of_2
from proa_engine.kernels.tilings import tilings_of


def prefill_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    num_decodes: int,
    scale: float,
    window: int | None,
    *,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
    batch_invariant: bool = False,
    slot_mapping: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
) -> None:
    """Write out [T, heads, D] for query [T, heads, D] of all requests behind the first `num_decodes`.

    `slot_mapping` [T] int64, which only a window needs: query tokens with slot -1 are padding and get zeros.
    `ends` [T] int32, not with `slot_mapping`: the end of the tokens that each token attends to; None: it is the last.
    With `batch_invariant` a token's bits do not depend on its position in a chunk or on the rest of the batch.
    """
    num_tokens, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    group = num_heads // num_kv_heads
    assert query.stride(-1) == 1
    assert out.is_contiguous()
    factor, cap = score_factors(scale, soft_cap)
    block_d = max(16, next_power_of_2(head_dim))
    tile = tilings_of(query.device).prefill_tile(
        block_d, query.element_size(), key_cache.element_size(), batch_invariant=batch_invariant
    )
    block_m = max(tile.rows, next_power_of_2(group))
    block_q = block_m // group
    num_requests = seq_lens.shape[0] - num_decodes
    prefill_attention_kernel[((num_tokens // block_q + num_requests) * num_kv_heads,)](
        query,
        key_cache,
        value_cache,
        out,
        query_start_loc,
        seq_lens,
        block_table,
        None if window is None else slot_mapping,
        sinks,
        ends,
        num_decodes,
        num_requests,
        factor,
        query.stride(0),
        query.stride(1),
        block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_STRIDE=block_stride(key_cache, value_cache),
        WINDOW=window or 0,
        SOFT_CAP=cap,
        BLOCK_M=block_m,
        BLOCK_Q=block_q,
        BLOCK_D=block_d,
        TILE=tile.tokens,
        ONE_LOOP=batch_invariant or block_d > 256,  # a second loop spills registers
        num_warps=tile.num_warps,
        num_stages=5,  # two for the block table, three for keys and values: one tile of them is in flight
    )


@triton.jit
def find_request(query_start_loc_ptr, block, num_requests, BLOCK_Q: tl.constexpr):
    """The request of query block `block`: those of request r begin with (start of r - start of 0) // BLOCK_Q + r."""
    origin = tl.load(query_start_loc_ptr)
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        if (tl.load(query_start_loc_ptr + middle) - origin) // BLOCK_Q + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


# Of several block tables, all but the first may begin anywhere.
@kernel(
    do_not_specialize=["first_request", "num_requests", "stride_table_request"],
    do_not_specialize_on_alignment=["block_table_ptr"],
)
def prefill_attention_kernel(
    query_ptr,  # [num_tokens, num_kv_heads * GROUP, HEAD_DIM]
    key_cache_ptr,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    value_cache_ptr,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    out_ptr,  # [num_tokens, num_kv_heads * GROUP, HEAD_DIM]
    query_start_loc_ptr,  # [first_request + num_requests + 1]
    seq_lens_ptr,  # [first_request + num_requests]
    block_table_ptr,  # [first_request + num_requests, max_blocks]
    slot_mapping_ptr,  # [num_tokens] int64; None: no query token has slot -1
    sinks_ptr,  # [num_kv_heads * GROUP]; None: no sinks
    ends_ptr,  # [num_tokens]; None: a token attends to none behind it
    first_request,
    num_requests,
    factor,
    stride_query_token,
    stride_query_head,
    stride_table_request,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: no window
    SOFT_CAP: tl.constexpr,  # see `attend_tile`
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    ONE_LOOP: tl.constexpr,
):
    # Late queries, of all heads, attend to the most tokens, and the longest programs should start first.
    block = (tl.num_programs(0) - 1 - tl.program_id(0)) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    starts_ptr = query_start_loc_ptr + first_request
    request = find_request(starts_ptr, block, num_requests, BLOCK_Q)
    start = tl.load(starts_ptr + request)
    query_len = tl.load(starts_ptr + request + 1) - start
    first_query = (block - (start - tl.load(starts_ptr)) // BLOCK_Q - request) * BLOCK_Q
    if first_query >= query_len:  # the grid is an upper bound
        return
    request += first_request
    context_len = tl.load(seq_lens_ptr + request) - query_len

    row = tl.arange(0, BLOCK_M)
    query_index = first_query + row // GROUP
    row_mask = (row < BLOCK_Q * GROUP) & (query_index < query_len)
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, BLOCK_D)
    token = (start + query_index).to(tl.int64)
    # [BLOCK_M, BLOCK_D]
    query = tl.load(
        query_ptr + (token * stride_query_token + head * stride_query_head)[:, None] + dim[None, :],
        mask=row_mask[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    position = context_len + query_index
    table_ptr = block_table_ptr + request.to(tl.int64) * stride_table_request
    end = context_len + tl.minimum(first_query + BLOCK_Q, query_len)
    ends = None
    if ends_ptr is not None:
        ends = tl.load(ends_ptr + token, mask=row_mask, other=0)
        end = tl.max(ends)

    maximum, total = first_state(sinks_ptr, head, row_mask, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first = 0
    # Every row attends to every token before it. Tokens before the request's beginning, of padding, attend to none.
    masked_start = tl.maximum(context_len + first_query + 1, 0) // TILE * TILE
    if WINDOW > 0:
        first = context_len + first_query - WINDOW + 1
        if slot_mapping_ptr is not None:
            is_token = tl.load(slot_mapping_ptr + token, mask=row_mask, other=-1) >= 0
            first = tl.min(tl.where(is_token, position, end)) - WINDOW + 1
            position = tl.where(is_token, position, -1)
        masked_start = tl.maximum(context_len + first_query - WINDOW + 1, 0) // TILE * TILE
    elif ONE_LOOP:  # two would meet at a point that depends on the chunk, and the compiler may fuse sums differently
        masked_start = 0
    # First the tiles that every row attends to as a whole, where there may be any, then the others.
    for masked in tl.static_range(1 if WINDOW > 0 or ONE_LOOP else 0, 2):
        for tile in range(masked_start if masked else 0, end if masked else masked_start, TILE):
            maximum, total, acc = attend_tile(
                query,
                maximum,
                total,
                acc,
                position,
                ends,
                tile,
                0,
                first,
                end,
                key_cache_ptr,
                value_cache_ptr,
                table_ptr,
                kv_head,
                factor,
                BLOCK_STRIDE=BLOCK_STRIDE,
                HEAD_DIM=HEAD_DIM,
                BLOCK_SIZE=BLOCK_SIZE,
                BLOCK_D=BLOCK_D,
                TILE=TILE,
                WINDOW=WINDOW,
                SOFT_CAP=SOFT_CAP,
                MASKED=masked == 1,
            )
    out_offset = (token * NUM_KV_HEADS * GROUP + head) * HEAD_DIM
    store_rows(out_ptr, out_offset, row_mask, total, acc, HEAD_DIM, BLOCK_D)
