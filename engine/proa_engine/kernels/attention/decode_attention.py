"""Paged attention (Kwon et al. 2023) for decodes, split along the context (flash-decoding).

A request has `width` query tokens, its last ones: 1, or 1 and the draft tokens that a step verifies, or the block for
which draft tokens are proposed, whose tokens also attend to those behind them. Grid: (kv_heads,
items, parts of the width), of fixed size; `decode_plan` assigns a row and a part of its context to each item, and
programs without an item return. Programs start in the order of the grid, so all heads of the longest items start first.
A program computes all query heads of one KV head and as many query tokens as fit into its tile, so that K and V are
read once for them. If a row has several items, each stores its softmax state in scratch memory, and the program that
ends last merges them in the order of the items (`arrive`, `merge_states`).

While attention runs, memory is nearly idle with few rows: programs without an item may read the weights of the next
products into the L2 cache (`prefetch`).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from proa_engine.kernels.arrive import arrive
from proa_engine.kernels.attention.attention_tile import attend_tile, first_state, score_factors, store_rows
from proa_engine.kernels.attention.decode_plan import DecodePlan
from proa_engine.kernels.attention.store_kv import block_stride
from proa_engine.kernels.launch import begin, cdiv, kernel, next_power_of_2
from proa_engine.kernels.prefetch import parts_ahead, prefetch_share

MIN_ROWS = 16  # of tl.dot
WIDE_ROWS = 64  # of wgmma
MAX_TILE = 64 * 128  # numbers of a program's queries: float32 sums of as many stay in registers


@triton.jit
def load_item(item_ptr, max_items, item):
    """Return what `DecodePlan.items` says of an item."""
    row = tl.load(item_ptr + item)
    start = tl.load(item_ptr + max_items + item)
    end = tl.load(item_ptr + 2 * max_items + item)
    seq_len = tl.load(item_ptr + 3 * max_items + item)
    first_item = tl.load(item_ptr + 4 * max_items + item)
    num_parts = tl.load(item_ptr + 5 * max_items + item)
    return row, start, end, seq_len, first_item, num_parts


@triton.jit
def tile_rows(
    first_query, kv_head, WIDTH: tl.constexpr, QUERIES: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr
):
    """A program's rows are (query token, head in group) pairs. Return both and the mask of those that exist."""
    query_index = first_query + tl.arange(0, BLOCK_M) // GROUP
    head = kv_head * GROUP + tl.arange(0, BLOCK_M) % GROUP
    return query_index, head, (query_index < WIDTH) & (query_index < first_query + QUERIES)


@triton.jit
def store_state(
    acc_ptr,  # [max_items, PART_SIZE, HEAD_DIM] float32, of all parts
    state_ptr,  # [2, max_items, PART_SIZE] float32: maximum and total
    part,  # [BLOCK_M] int64: item * PART_SIZE + place of each row in the part
    state_size,  # max_items * PART_SIZE
    maximum,  # [BLOCK_M] float32, as `total` and `acc` the state
    total,  # [BLOCK_M]
    acc,  # [BLOCK_M, BLOCK_D]
    mask,  # [BLOCK_M]
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store the state of a part of a row."""
    dim = tl.arange(0, BLOCK_D)
    in_head = mask[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(acc_ptr + (part * HEAD_DIM)[:, None] + dim[None, :], acc, mask=in_head)
    tl.store(state_ptr + part, maximum, mask=mask)
    tl.store(state_ptr + state_size + part, total, mask=mask)


@triton.jit
def merge_states(
    acc_ptr,
    state_ptr,
    first_part,  # [BLOCK_M] int64: of the row's first item
    state_size,
    num_parts,
    mask,
    PART_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAY_SEE_NOTHING: tl.constexpr,  # whether a query token may attend to no token of a part
    UNROLL: tl.constexpr,  # parts that are loaded at a time
):
    """Merge a row's parts, in the order of its items. Returns the state: maximum and total, [BLOCK_M] each, and acc
    [BLOCK_M, BLOCK_D]."""
    dim = tl.arange(0, BLOCK_D)
    in_head = mask[:, None] & (dim < HEAD_DIM)[None, :]
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for index in tl.range(0, num_parts, loop_unroll_factor=UNROLL):
        part = first_part + index * PART_SIZE
        part_maximum = tl.load(state_ptr + part, mask=mask, other=0.0, cache_modifier=".cg")
        part_total = tl.load(state_ptr + state_size + part, mask=mask, other=0.0, cache_modifier=".cg")
        part_acc = tl.load(
            acc_ptr + (part * HEAD_DIM)[:, None] + dim[None, :], mask=in_head, other=0.0, cache_modifier=".cg"
        )
        new_maximum = tl.maximum(maximum, part_maximum)
        # If all parts so far have the maximum -inf, -inf - -inf would be NaN.
        safe_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum) if MAY_SEE_NOTHING else new_maximum
        rescale = tl.exp2(maximum - safe_maximum)
        part_scale = tl.exp2(part_maximum - safe_maximum)
        total = total * rescale + part_total * part_scale
        acc = acc * rescale[:, None] + part_acc * part_scale[:, None]
        maximum = new_maximum
    return maximum, total, acc


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    plan: DecodePlan,
    scale: float,
    *,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
    following: Sequence[torch.Tensor] = (),
) -> None:
    """Write rows 0 … plan.num_rows * plan.width of out [T, heads, D] from the same rows of query [T, heads, D].

    Zeros for padding: query tokens before their request's beginning, and those without a slot if the plan has slots. If
    the plan is not causal, only for those of a row without tokens.

    `following`: the weights of the next products, in their order, for `PROA_L2_PREFETCH`.
    """
    _, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    group = num_heads // num_kv_heads
    assert query.stride(-1) == 1
    assert out.is_contiguous()
    factor, cap = score_factors(scale, soft_cap)
    max_items = plan.max_items
    block_d = max(16, next_power_of_2(head_dim))
    block_m = min(next_power_of_2(group * plan.width), MAX_TILE // block_d)
    block_m = max(MIN_ROWS, next_power_of_2(group), block_m)
    queries = min(block_m // group, plan.width)
    merge_rows = next_power_of_2(group * queries)
    ahead = parts_ahead(following)
    decode_attention_kernel[(num_kv_heads, max_items, cdiv(plan.width, queries))](
        query,
        key_cache,
        value_cache,
        out,
        torch.empty(max_items, plan.width, num_heads, head_dim, dtype=torch.float32, device=query.device),
        torch.empty(2, max_items, plan.width, num_heads, dtype=torch.float32, device=query.device),
        block_table,
        plan.slot_mapping,
        sinks,
        plan.items,
        plan.arrived,
        ahead,
        max_items,
        0 if ahead is None else ahead.shape[0],
        factor,
        query.stride(0),
        query.stride(1),
        block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_STRIDE=block_stride(key_cache, value_cache),
        WIDTH=plan.width,
        QUERIES=queries,
        WINDOW=plan.window or 0,
        CAUSAL=plan.causal,
        SOFT_CAP=cap,
        BLOCK_M=block_m,
        MERGE_ROWS=merge_rows,
        MERGE_UNROLL=8 if merge_rows * block_d <= 1024 else 4,
        BLOCK_D=block_d,
        TILE=_tile(block_d * query.element_size()),
        num_warps=_num_warps(block_m, block_d),
        num_stages=6,  # three for the block table, three for keys and values: two tiles of them are in flight
    )


def _tile(row_bytes: int) -> int:
    """Tokens a tile: keys and values of three tiles in flight leave room for a second program on a multiprocessor."""
    return 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16


def _num_warps(block_m: int, block_d: int) -> int:
    """Eight where the queries and sums of four would spill registers."""
    is_full = block_m > MIN_ROWS and block_m * block_d == MAX_TILE
    return 8 if block_m >= WIDE_ROWS or is_full else 4


@kernel(do_not_specialize=["max_items", "num_ahead", "stride_table_request"])
def decode_attention_kernel(
    query_ptr,  # [num_tokens, num_kv_heads * GROUP, HEAD_DIM]
    key_cache_ptr,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    value_cache_ptr,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    out_ptr,  # [num_tokens, num_kv_heads * GROUP, HEAD_DIM]
    part_acc_ptr,  # [max_items, WIDTH, num_kv_heads * GROUP, HEAD_DIM] float32: what items of split rows leave
    part_state_ptr,  # [2, max_items, WIDTH, num_kv_heads * GROUP] float32: maximum and total
    block_table_ptr,  # [num_rows, max_blocks]
    slot_mapping_ptr,  # [num_tokens] int64; None unless rows may have padding that a window's keys depend on
    sinks_ptr,  # [num_kv_heads * GROUP]; None: no sinks
    item_ptr,  # [6, max_items], see `DecodePlan`
    arrived_ptr,  # [num_rows, num_kv_heads, WIDTH]: the first of each part of the width is used
    ahead_ptr,  # [num_ahead, 2] int64, see `parts_ahead`; None: no weight is read beforehand
    max_items,
    num_ahead,
    factor,
    stride_query_token,
    stride_query_head,
    stride_table_request,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,  # query tokens of a row
    QUERIES: tl.constexpr,  # of them in a program
    WINDOW: tl.constexpr,  # 0: no window
    CAUSAL: tl.constexpr,  # False: a row's query tokens attend to all of its tokens; there is no window
    SOFT_CAP: tl.constexpr,  # see `attend_tile`
    BLOCK_M: tl.constexpr,
    MERGE_ROWS: tl.constexpr,  # at least QUERIES * GROUP, at most BLOCK_M, whose other rows hold nothing
    MERGE_UNROLL: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    row, start, end, seq_len, first_item, num_parts = load_item(item_ptr, max_items, item)
    if row < 0:  # the grid is an upper bound
        if PDL and ahead_ptr is not None:
            programs = NUM_KV_HEADS * tl.num_programs(2)  # of an item; `start` is the number of items
            share = (item - start) * programs + tl.program_id(2) * NUM_KV_HEADS + kv_head
            prefetch_share(ahead_ptr, num_ahead, share, (max_items - start) * programs, LANES=128)
        return

    first_query = tl.program_id(2) * QUERIES
    query_index, head, row_mask = tile_rows(first_query, kv_head, WIDTH, QUERIES, GROUP, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    mask = row_mask[:, None] & (dim < HEAD_DIM)[None, :]
    token = row.to(tl.int64) * WIDTH + query_index
    query_offset = token * stride_query_token + head * stride_query_head
    # [BLOCK_M, BLOCK_D]
    query = tl.load(query_ptr + query_offset[:, None] + dim[None, :], mask=mask, other=0.0)
    table_ptr = block_table_ptr + row.to(tl.int64) * stride_table_request
    position = seq_len - WIDTH + query_index  # negative: padding, which attends to nothing
    first = 0
    if WINDOW > 0:
        first = seq_len - WIDTH + first_query - WINDOW + 1
        if slot_mapping_ptr is not None:
            is_token = tl.load(slot_mapping_ptr + token, mask=row_mask, other=-1) >= 0
            first = tl.min(tl.where(is_token, position, seq_len)) - WINDOW + 1
            position = tl.where(is_token, position, -1)

    maximum, total = first_state(sinks_ptr, head, row_mask & (item == first_item), BLOCK_M)
    by_lane: tl.constexpr = WINDOW == 0 and BLOCK_M <= 16  # otherwise it takes registers that another program needs
    if by_lane:
        total = tl.where(tl.arange(0, TILE)[None, :] == 0, total[:, None], 0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    has_registers: tl.constexpr = BLOCK_D <= 128 or BLOCK_M <= 16  # otherwise `load_part_tile` would spill some
    for tile in range(start, end, TILE):
        maximum, total, acc = attend_tile(
            query,
            maximum,
            total,
            acc,
            position if WIDTH > 1 and CAUSAL else None,
            None,
            tile,
            start,
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
            MASKED=True,
            BY_PART=WINDOW == 0 and TILE % BLOCK_SIZE == 0 and has_registers,
            BY_LANE=by_lane,
        )
    if by_lane:
        total = tl.sum(total, axis=1)

    part_size: tl.constexpr = WIDTH * NUM_KV_HEADS * GROUP
    if num_parts == 1:
        store_rows(out_ptr, (token * NUM_KV_HEADS * GROUP + head) * HEAD_DIM, row_mask, total, acc, HEAD_DIM, BLOCK_D)
    else:
        state_size = max_items.to(tl.int64) * part_size
        arrived_ptr += (row * NUM_KV_HEADS + kv_head) * WIDTH + first_query
        store_state(
            part_acc_ptr,
            part_state_ptr,
            item.to(tl.int64) * part_size + query_index * NUM_KV_HEADS * GROUP + head,
            state_size,
            maximum,
            total,
            acc,
            row_mask,
            HEAD_DIM,
            BLOCK_D,
        )
        if arrive(arrived_ptr, 1, num_parts):
            tl.store(arrived_ptr, 0)  # for the next layer
            merged_index, merged_head, merged_mask = tile_rows(first_query, kv_head, WIDTH, QUERIES, GROUP, MERGE_ROWS)
            state = merged_index * NUM_KV_HEADS * GROUP + merged_head
            _, merged_total, merged = merge_states(
                part_acc_ptr,
                part_state_ptr,
                first_item.to(tl.int64) * part_size + state,
                state_size,
                num_parts,
                merged_mask,
                PART_SIZE=part_size,
                HEAD_DIM=HEAD_DIM,
                BLOCK_M=MERGE_ROWS,
                BLOCK_D=BLOCK_D,
                MAY_SEE_NOTHING=WIDTH > 1,
                UNROLL=MERGE_UNROLL,
            )
            out_offset = (row.to(tl.int64) * part_size + state) * HEAD_DIM
            store_rows(out_ptr, out_offset, merged_mask, merged_total, merged, HEAD_DIM, BLOCK_D)
