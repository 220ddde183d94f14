"""Attention of prompts and chunks of prompts over latent rows, all requests in one launch.

A program computes `QUERIES` tokens of one request for a group of heads. Grid as that of `prefill_attention`. A token's
result does not depend on its place in a chunk or on the rest of the batch.
"""

import triton.language as tl

from proa_engine.kernels.attention_tile import store_rows
from proa_engine.kernels.latent_tile import attend_latents, load_queries
from proa_engine.kernels.launch import kernel
from proa_engine.kernels.prefill_attention import find_request


@kernel(do_not_specialize=["first_request", "num_requests", "stride_table_request"])
def latent_prefill_kernel(
    query_ptr,  # [num_tokens, NUM_HEADS, RANK + ROPE_DIM]
    cache_ptr,  # [num_blocks, BLOCK_SIZE, RANK + ROPE_DIM]
    out_ptr,  # [num_tokens, NUM_HEADS, RANK]
    query_start_loc_ptr,  # [first_request + num_requests + 1]
    seq_lens_ptr,  # [first_request + num_requests]
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
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
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
    end = tl.minimum(seq_len - query_len + first_query + QUERIES, seq_len)
    table_ptr = block_table_ptr + request.to(tl.int64) * stride_table_request
    _, total, acc = attend_latents(
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
        QUERIES * GROUP,
        BLOCK_RANK,
        BLOCK_ROPE,
        TILE,
    )
    store_rows(out_ptr, place * RANK, mask, total, acc, RANK, BLOCK_RANK)
