"""Attention over latent rows on a GPU.

Decodes are split along the context as in `decode_attention`. Grid: (groups of heads, items, query tokens of a row). The
program of a row that ends last merges the parts, in the order of the items (`arrive`).

Prompts and chunks of prompts, all requests in one launch: a program computes `QUERIES` tokens of one request for a
group of heads. Grid as that of `prefill_attention`. A token's result does not depend on its place in a chunk or on the
rest of the batch. The state in both is that of `attention_tile`.

With `ends` the cache holds only some of the tokens, in order: each query token attends to the first `ends` of them, and
the logarithm of its sum of weights is stored too, so that results over the other tokens can be added.
"""

import triton
import triton.language as tl

from proa_engine.kernels.arrive import arrive
from proa_engine.kernels.attention.attention_tile import store_rows
from proa_engine.kernels.attention.decode_attention import load_item, merge_states, store_state
from proa_engine.kernels.attention.prefill_attention import find_request
from proa_engine.kernels.launch import begin, kernel


@triton.jit
def load_queries(
    query_ptr,  # [num_tokens, NUM_HEADS, RANK + ROPE_DIM]
    row,  # [BLOCK_M] int64: token * NUM_HEADS + head
    mask,  # [BLOCK_M]
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    """Return the queries' parts [BLOCK_M, BLOCK_RANK] and [BLOCK_M, BLOCK_ROPE]."""
    start = query_ptr + (row * (RANK + ROPE_DIM))[:, None]
    column = tl.arange(0, BLOCK_RANK)[None, :]
    latent = tl.load(start + column, mask=mask[:, None] & (column < RANK), other=0.0)
    column = tl.arange(0, BLOCK_ROPE)[None, :]
    return latent, tl.load(start + RANK + column, mask=mask[:, None] & (column < ROPE_DIM), other=0.0)


@triton.jit
def attend_latents(
    latent_query,  # [BLOCK_M, BLOCK_RANK]
    rope_query,  # [BLOCK_M, BLOCK_ROPE]
    position,  # [BLOCK_M]: of each row's query in its request
    start,
    end,  # of the tokens that any row may attend to
    cache_ptr,  # [num_blocks, BLOCK_SIZE, RANK + ROPE_DIM]
    table_ptr,  # [max_blocks]: the request's row
    scale_log2,  # scale * log2(e)
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the state: maximum and total, [BLOCK_M] each, and acc [BLOCK_M, BLOCK_RANK], all float32."""
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_RANK], tl.float32)
    for tile in range(start, end, TILE):
        key_position = tile + tl.arange(0, TILE)
        is_read = key_position < end
        physical = tl.load(table_ptr + key_position // BLOCK_SIZE, mask=is_read, other=0).to(tl.int64)
        place = physical * BLOCK_STRIDE + key_position % BLOCK_SIZE * (RANK + ROPE_DIM)
        row = cache_ptr + place[:, None]
        # [TILE, BLOCK_RANK] and [TILE, BLOCK_ROPE]; tokens behind the end are read as zeros, because they may be NaN
        column = tl.arange(0, BLOCK_RANK)[None, :]
        latent = tl.load(row + column, mask=is_read[:, None] & (column < RANK), other=0.0)
        column = tl.arange(0, BLOCK_ROPE)[None, :]
        rope = tl.load(row + RANK + column, mask=is_read[:, None] & (column < ROPE_DIM), other=0.0)
        # [BLOCK_M, TILE]
        scores = tl.dot(latent_query, tl.trans(latent), input_precision="tf32x3")
        scores = tl.dot(rope_query, tl.trans(rope), scores, input_precision="tf32x3") * scale_log2
        scores = tl.where((key_position[None, :] <= position[:, None]) & is_read[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        # For a row without any visible token so far -inf - -inf would be NaN.
        safe_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - safe_maximum[:, None])
        rescale = tl.exp2(maximum - safe_maximum)
        total = total * rescale + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * rescale[:, None], input_precision="tf32x3")
        maximum = new_maximum
    return maximum, total, acc


@triton.jit
def store_log_sums(
    log_sums_ptr,  # None: they are not needed
    place,  # [BLOCK_M]
    mask,  # [BLOCK_M]
    maximum,  # [BLOCK_M] float32, as `total` the state
    total,
):
    """Store the binary logarithm of each row's sum of weights; -inf for a row that has seen nothing."""
    if log_sums_ptr is not None:
        tl.store(log_sums_ptr + place, maximum + tl.log2(total), mask=mask)


@kernel(do_not_specialize=["max_items", "stride_table_request"])
def latent_decode_kernel(
    query_ptr,  # [num_tokens, NUM_HEADS, RANK + ROPE_DIM]
    cache_ptr,  # [num_blocks, BLOCK_SIZE, RANK + ROPE_DIM]
    out_ptr,  # [num_tokens, NUM_HEADS, RANK]
    log_sums_ptr,  # [num_tokens, NUM_HEADS] float32, with `ends`; None without
    part_acc_ptr,  # [max_items, WIDTH, NUM_HEADS, RANK] float32: what items of split rows leave
    part_state_ptr,  # [2, max_items, WIDTH, NUM_HEADS] float32: maximum and total
    ends_ptr,  # [num_tokens] int32: tokens of the cache that a query token attends to; None: up to itself
    block_table_ptr,  # [num_rows, max_blocks]
    item_ptr,  # [6, max_items], see `DecodePlan`
    arrived_ptr,  # [num_rows, groups, WIDTH]
    max_items,
    scale_log2,
    stride_table_request,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    WIDTH: tl.constexpr,  # query tokens of a row
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    group = tl.program_id(0)
    item = tl.program_id(1)
    query_index = tl.program_id(2)
    row, start, end, seq_len, first_item, num_parts = load_item(item_ptr, max_items, item)
    if row < 0:  # the grid is an upper bound
        return

    head = group * GROUP + tl.arange(0, GROUP)
    mask = head < NUM_HEADS
    place = (row.to(tl.int64) * WIDTH + query_index) * NUM_HEADS + head
    latent, rope = load_queries(query_ptr, place, mask, RANK, ROPE_DIM, BLOCK_RANK, BLOCK_ROPE)
    # Negative: padding, which attends to nothing.
    last = seq_len - WIDTH + query_index
    if ends_ptr is not None:
        last = tl.load(ends_ptr + row * WIDTH + query_index) - 1
    position = tl.zeros([GROUP], tl.int32) + last
    table_ptr = block_table_ptr + row.to(tl.int64) * stride_table_request
    maximum, total, acc = attend_latents(
        latent,
        rope,
        position,
        start,
        end,
        cache_ptr,
        table_ptr,
        scale_log2,
        RANK,
        ROPE_DIM,
        BLOCK_SIZE,
        BLOCK_STRIDE,
        GROUP,
        BLOCK_RANK,
        BLOCK_ROPE,
        TILE,
    )

    if num_parts == 1:
        store_rows(out_ptr, place * RANK, mask, total, acc, RANK, BLOCK_RANK)
        store_log_sums(log_sums_ptr, place, mask, maximum, total)
    else:
        part_size: tl.constexpr = WIDTH * NUM_HEADS
        state = query_index * NUM_HEADS + head
        part = item.to(tl.int64) * part_size + state
        state_size = max_items.to(tl.int64) * part_size
        arrived_ptr += (row * tl.num_programs(0) + group) * WIDTH + query_index
        store_state(part_acc_ptr, part_state_ptr, part, state_size, maximum, total, acc, mask, RANK, BLOCK_RANK)
        if arrive(arrived_ptr, 1, num_parts):
            tl.store(arrived_ptr, 0)  # for the next layer
            maximum, total, acc = merge_states(
                part_acc_ptr,
                part_state_ptr,
                first_item.to(tl.int64) * part_size + state,
                state_size,
                num_parts,
                mask,
                PART_SIZE=part_size,
                HEAD_DIM=RANK,
                BLOCK_M=GROUP,
                BLOCK_D=BLOCK_RANK,
                MAY_SEE_NOTHING=WIDTH > 1,
                UNROLL=1,  # more would spill registers
            )
            store_rows(out_ptr, place * RANK, mask, total, acc, RANK, BLOCK_RANK)
            store_log_sums(log_sums_ptr, place, mask, maximum, total)


@kernel(do_not_specialize=["first_request", "num_requests", "stride_table_request"])
def latent_prefill_kernel(
    query_ptr,  # [num_tokens, NUM_HEADS, RANK + ROPE_DIM]
    cache_ptr,  # [num_blocks, BLOCK_SIZE, RANK + ROPE_DIM]
    out_ptr,  # [num_tokens, NUM_HEADS, RANK]
    log_sums_ptr,  # [num_tokens, NUM_HEADS] float32, with `ends`; None without
    query_start_loc_ptr,  # [first_request + num_requests + 1]
    seq_lens_ptr,  # [first_request + num_requests]
    ends_ptr,  # [num_tokens] int32: tokens of the cache that a query token attends to; None: up to itself
    block_table_ptr,  # [first_request + num_requests, max_blocks]
    first_request,
    num_requests,
    scale_log2,
    stride_table_request,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    block = tl.program_id(0)
    request = first_request + find_request(query_start_loc_ptr + first_request, block, num_requests, QUERIES)
    origin = tl.load(query_start_loc_ptr + first_request)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    first_block = (query_start - origin) // QUERIES + request - first_request
    first_query = (block - first_block) * QUERIES
    if first_query >= query_len:  # the grid is an upper bound
        return
    seq_len = tl.load(seq_lens_ptr + request)
    # The tile's rows are (query token, head in group) pairs.
    row = tl.arange(0, QUERIES * GROUP)
    query_index = first_query + row // GROUP
    head = tl.program_id(1) * GROUP + row % GROUP
    mask = (query_index < query_len) & (head < NUM_HEADS)
    place = (query_start + query_index).to(tl.int64) * NUM_HEADS + head
    latent, rope = load_queries(query_ptr, place, mask, RANK, ROPE_DIM, BLOCK_RANK, BLOCK_ROPE)
    position = seq_len - query_len + query_index
    if ends_ptr is not None:
        position = tl.load(ends_ptr + query_start + query_index, mask=query_index < query_len, other=0) - 1
        end = tl.max(position) + 1
    else:
        end = tl.minimum(seq_len - query_len + first_query + QUERIES, seq_len)
    table_ptr = block_table_ptr + request.to(tl.int64) * stride_table_request
    maximum, total, acc = attend_latents(
        latent,
        rope,
        position,
        0,
        end,
        cache_ptr,
        table_ptr,
        scale_log2,
        RANK,
        ROPE_DIM,
        BLOCK_SIZE,
        BLOCK_STRIDE,
        QUERIES * GROUP,
        BLOCK_RANK,
        BLOCK_ROPE,
        TILE,
    )
    store_rows(out_ptr, place * RANK, mask, total, acc, RANK, BLOCK_RANK)
    store_log_sums(log_sums_ptr, place, mask, maximum, total)
