"""Attention of decodes over latent rows, split along the context as in `decode_attention`.

Grid: (items, groups of heads, query tokens of a row). The program of a row that finishes last merges the parts, in the
order of the items.
"""

import triton.language as tl

from proa_engine.kernels.attention_tile import store_rows
from proa_engine.kernels.decode_parts import merge_parts, store_part
from proa_engine.kernels.latent_tile import attend_latents, load_queries
from proa_engine.kernels.launch import kernel


@kernel(do_not_specialize=["max_items", "stride_table_request"])
def latent_decode_kernel(
    query_ptr,  # [num_tokens, NUM_HEADS, RANK + ROPE_DIM]
    cache_ptr,  # [num_blocks, BLOCK_SIZE, RANK + ROPE_DIM]
    out_ptr,  # [num_tokens, NUM_HEADS, RANK]
    part_acc_ptr,  # [max_items, WIDTH, NUM_HEADS, RANK] float32: what items of split rows leave
    part_state_ptr,  # [2, max_items, WIDTH, NUM_HEADS] float32: maximum and total
    seq_lens_ptr,  # [num_rows]
    block_table_ptr,  # [num_rows, max_blocks]
    item_row_ptr,  # [max_items]
    first_item_ptr,  # [num_rows + 1]
    split_length_ptr,  # [1]
    arrived_ptr,  # [num_rows, groups, WIDTH]
    max_items,
    scale_log2,
    stride_table_request,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    WIDTH: tl.constexpr,  # query tokens of a row
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    item = tl.program_id(0)
    group = tl.program_id(1)
    query_index = tl.program_id(2)
    row = tl.load(item_row_ptr + item)
    if row < 0:  # the grid is an upper bound
        return
    seq_len = tl.load(seq_lens_ptr + row)
    first_item = tl.load(first_item_ptr + row)
    num_splits = tl.load(first_item_ptr + row + 1) - first_item
    length = tl.load(split_length_ptr)
    start = (item - first_item) * length
    end = tl.minimum(start + length, seq_len)

    head = group * GROUP + tl.arange(0, GROUP)
    mask = head < NUM_HEADS
    place = (row.to(tl.int64) * WIDTH + query_index) * NUM_HEADS + head
    latent, rope = load_queries(query_ptr, place, mask, RANK, ROPE_DIM, BLOCK_RANK, BLOCK_ROPE)
    # Negative: padding, which attends to nothing.
    position = tl.zeros([GROUP], tl.int32) + seq_len - WIDTH + query_index
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
        GROUP,
        BLOCK_RANK,
        BLOCK_ROPE,
        TILE,
    )

    if num_splits == 1:
        store_rows(out_ptr, place * RANK, mask, total, acc, RANK, BLOCK_RANK)
    else:
        part_size: tl.constexpr = WIDTH * NUM_HEADS
        state = query_index * NUM_HEADS + head
        part = item.to(tl.int64) * part_size + state
        state_size = max_items.to(tl.int64) * part_size
        arrived_ptr += (row * tl.num_programs(1) + group) * WIDTH + query_index
        num_arrived = store_part(
            part_acc_ptr, part_state_ptr, arrived_ptr, part, state_size, maximum, total, acc, mask, RANK, BLOCK_RANK
        )
        if num_arrived == num_splits - 1:
            tl.store(arrived_ptr, 0)  # for the next layer
            total, acc = merge_parts(
                part_acc_ptr,
                part_state_ptr,
                first_item.to(tl.int64) * part_size + state,
                state_size,
                num_splits,
                mask,
                PART_SIZE=part_size,
                HEAD_DIM=RANK,
                BLOCK_M=GROUP,
                BLOCK_D=BLOCK_RANK,
                MAY_SEE_NOTHING=WIDTH > 1,
                UNROLL=1,  # more would spill registers
            )
            store_rows(out_ptr, place * RANK, mask, total, acc, RANK, BLOCK_RANK)
