"""The kernel of `prefill_hopper`, in Gluon: copies, matrix products and softmax run beside each other.

As in `prefill_attention`, a program computes BLOCK_Q query tokens of one request for all query heads of one KV head.

One warp, the producer, has the tensor memory accelerator copy keys and values, block by block, into STAGES buffers.
The rows of the program's queries are divided among CONSUMERS groups of four warps with 64 rows each. A consumer
multiplies the scores of a tile of tokens and the values of the tile before it at the same time, so that the softmax of
the one runs beside the product of the other (FlashAttention-3, arXiv 2407.08608). Barriers in shared memory say which
buffers are full and which are free; a wait's second argument is the parity of how often the buffer was used.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from proa_engine.kernels.attention.attention_tile import LOG2_E
from proa_engine.kernels.attention.prefill_attention import find_request
from proa_engine.kernels.launch import kernel

PART = 64  # numbers of 16 bits in the widest row that the accelerator swizzles

_LOG2_E = gl.constexpr(LOG2_E)
_PART = gl.constexpr(PART)


@gluon.jit
def _produce(
    caches,  # of keys and of values
    pieces,
    barriers,
    table_ptr,
    tiles,  # as in `_consume`
    columns,  # of the block table: the first and the last that may be read
    kv_head,
    ROWS_PER_BLOCK: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
):
    k_ready, k_free, v_ready, v_free = barriers
    PIECES: gl.constexpr = TILE // BLOCK_SIZE
    for tile in range(tiles[2]):
        stage = tile % STAGES
        parity = (tile // STAGES) & 1
        # All of them before the first copy: the compiler does not move a load before one.
        rows = ()
        for piece in gl.static_range(PIECES):
            column = gl.minimum(gl.maximum((tiles[0] + tile) * PIECES + piece, columns[0]), columns[1])
            row = gl.load(table_ptr + column) * ROWS_PER_BLOCK + kv_head * BLOCK_SIZE
            rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005 (Gluon does not unpack)
        mbarrier.wait(k_free.index(stage), parity ^ 1)
        _copy_tile(caches[0], rows, pieces[0], k_ready.index(stage), stage, PIECES, PARTS, TILE)
        mbarrier.wait(v_free.index(stage), parity ^ 1)
        _copy_tile(caches[1], rows, pieces[1], v_ready.index(stage), stage, PIECES, PARTS, TILE)


@gluon.jit
def _copy_tile(cache, rows, pieces, ready, stage, PIECES: gl.constexpr, PARTS: gl.constexpr, TILE: gl.constexpr):
    mbarrier.expect(ready, TILE * _PART * PARTS * 2)
    for piece in gl.static_range(PIECES):
        for part in gl.static_range(PARTS):
            target = pieces.index((stage * PARTS + part) * PIECES + piece)
            tma.async_copy_global_to_shared(cache, [rows[piece], part * _PART], ready, target)


@gluon.jit
def _softmax(
    scores,  # [ROWS, TILE], without the factor
    maximum,  # [ROWS], without the factor
    total,  # [ROWS]
    factor,
    position,  # [ROWS]
    first_token,  # of the tile
    end,
    LAYOUT: gl.constexpr,
    TILE: gl.constexpr,
    WINDOW: gl.constexpr,
    MASKED: gl.constexpr,
):
    if MASKED:
        key_position = first_token + gl.arange(0, TILE, layout=gl.SliceLayout(0, LAYOUT))
        visible = gl.expand_dims(key_position, 0) <= gl.expand_dims(position, 1)
        visible = visible & gl.expand_dims(key_position < end, 0)
        if WINDOW > 0:
            visible = visible & (gl.expand_dims(key_position, 0) > gl.expand_dims(position, 1) - WINDOW)
        scores = gl.where(visible, scores, float("-inf"))
    new_maximum = gl.maximum(maximum, gl.max(scores, axis=1))
    safe_maximum = new_maximum
    if MASKED:  # a row may not have seen any token yet
        safe_maximum = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    rescale = gl.exp2((maximum - safe_maximum) * factor)
    weights = gl.exp2(scores * factor - gl.expand_dims(safe_maximum * factor, 1))
    total = total * rescale + gl.sum(weights, axis=1)
    return weights, new_maximum, total, rescale


@gluon.jit
def _zero_unread(values, first_token, first, end, TILE: gl.constexpr, D: gl.constexpr):
    """Values that no row may attend to may be NaN. All consumers write the same."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    position = first_token + gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    is_read = (position >= first) & (position < end)
    value = gl.where(gl.expand_dims(is_read, 1), values.load(LAYOUT), 0.0)
    values.store(value.to(values.dtype))
    fence_async_shared()


@gluon.jit
def _attend_tile(
    q,
    tiles_k,
    tiles_v,
    barriers,
    state,  # acc, weights of the tile before, maximum, total
    factor,
    position,
    tile,  # counted from first_tile
    first_tile,
    num_tiles,
    first,
    end,
    SCORES: gl.constexpr,  # layout
    OUT: gl.constexpr,  # layout
    ROWS: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    D: gl.constexpr,
    WINDOW: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Multiply the scores of `tile`, and the values of the tile before it with their weights."""
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    k_ready, k_free, v_ready, v_free = barriers
    acc, weights, maximum, total = state
    stage = tile % STAGES
    before = (tile - 1) % STAGES
    zeros = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    scores = warpgroup_mma(q, tiles_k.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(before), ((tile - 1) // STAGES) & 1)
    if WINDOW > 0:
        _zero_unread(tiles_v.index(before), (first_tile + tile - 1) * TILE, first, end, TILE, D)
    acc = warpgroup_mma(weights, tiles_v.index(before), acc, is_async=True)
    scores = warpgroup_mma_wait(num_outstanding=1, deps=[scores])
    mbarrier.arrive(k_free.index(stage), count=1)
    next_weights, maximum, total, rescale = _softmax(
        scores, maximum, total, factor, position, (first_tile + tile) * TILE, end, SCORES, TILE, WINDOW, MASKED
    )
    # To wait for the next keys here makes a branch; without one ptxas moves the softmax behind the wait for the values.
    mbarrier.wait(k_ready.index((tile + 1) % STAGES), ((tile + 1) // STAGES) & 1, pred=tile + 1 < num_tiles)
    acc, next_weights = warpgroup_mma_wait(num_outstanding=0, deps=[acc, next_weights])
    weights = gl.convert_layout(next_weights.to(tiles_v.dtype), WEIGHTS)
    mbarrier.arrive(v_free.index(before), count=1)
    acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, OUT)), 1)
    return acc, weights, maximum, total


@gluon.jit
def _consume(
    pointers,  # query, out, sinks
    buffers,  # queries, tiles of keys, of values
    barriers,
    request,  # where its tokens start, their number, the tokens before them
    first_query,
    tiles,  # first, number of those that every row attends to as a whole, number
    first,
    end,
    kv_head,
    factor,
    strides,  # of a query token and a query head
    CONSUMER: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    ROWS: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    D: gl.constexpr,
    WINDOW: gl.constexpr,
):
    WARPS: gl.constexpr = gl.num_warps()
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, TILE, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    QUERY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    query_ptr, out_ptr, sinks_ptr = pointers
    queries, tiles_k, tiles_v = buffers
    k_ready, k_free, v_ready, _v_free = barriers
    start, query_len, context_len = request
    first_tile, num_full, num_tiles = tiles

    if num_tiles > 0:
        row = CONSUMER * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, QUERY))
        dim = gl.arange(0, D, layout=gl.SliceLayout(0, QUERY))
        token = (start + first_query + row // GROUP).to(gl.int64)
        head = kv_head * GROUP + row % GROUP
        mask = (row < BLOCK_Q * GROUP) & (first_query + row // GROUP < query_len)
        offset = gl.expand_dims(token * strides[0] + head * strides[1], 1) + gl.expand_dims(dim, 0)
        q = queries.index(CONSUMER)
        q.store(gl.load(query_ptr + offset, mask=gl.expand_dims(mask, 1), other=0.0))
        fence_async_shared()

        row_s = CONSUMER * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
        position = context_len + first_query + row_s // GROUP
        maximum = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
        if sinks_ptr is not None:
            sink = gl.load(sinks_ptr + kv_head * GROUP + row_s % GROUP).to(gl.float32)
            maximum = sink * (_LOG2_E / factor)
            total = gl.where(sink == float("-inf"), 0.0, 1.0)
        mbarrier.wait(k_ready.index(0), 0)
        zeros = gl.zeros([ROWS, TILE], gl.float32, SCORES)
        scores = warpgroup_mma(q, tiles_k.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=[scores])
        mbarrier.arrive(k_free.index(0), count=1)
        weights, maximum, total, _rescale = _softmax(
            scores, maximum, total, factor, position, first_tile * TILE, end, SCORES, TILE, WINDOW, True
        )
        weights = gl.convert_layout(weights.to(tiles_v.dtype), WEIGHTS)
        acc = gl.zeros([ROWS, D], gl.float32, OUT)
        mbarrier.wait(k_ready.index(1), 0, pred=num_tiles > 1)
        for tile in range(1, num_full):
            acc, weights, maximum, total = _attend_tile(
                q, tiles_k, tiles_v, barriers, (acc, weights, maximum, total), factor, position, tile, first_tile,
                num_tiles, first, end, SCORES, OUT, ROWS, TILE, STAGES, D, WINDOW, False,
            )  # fmt: skip
        for tile in range(gl.maximum(num_full, 1), num_tiles):
            acc, weights, maximum, total = _attend_tile(
                q, tiles_k, tiles_v, barriers, (acc, weights, maximum, total), factor, position, tile, first_tile,
                num_tiles, first, end, SCORES, OUT, ROWS, TILE, STAGES, D, WINDOW, True,
            )  # fmt: skip
        last = (num_tiles - 1) % STAGES
        mbarrier.wait(v_ready.index(last), ((num_tiles - 1) // STAGES) & 1)
        if WINDOW > 0 or (first_tile + num_tiles) * TILE > end:
            _zero_unread(tiles_v.index(last), (first_tile + num_tiles - 1) * TILE, first, end, TILE, D)
        acc = warpgroup_mma(weights, tiles_v.index(last), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        total = gl.convert_layout(total, gl.SliceLayout(1, OUT))
        result = acc * gl.expand_dims(1.0 / gl.where(total == 0.0, 1.0, total), 1)
    else:
        result = gl.zeros([ROWS, D], gl.float32, OUT)
    row_o = CONSUMER * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    dim_o = gl.arange(0, D, layout=gl.SliceLayout(0, OUT))
    mask_o = (row_o < BLOCK_Q * GROUP) & (first_query + row_o // GROUP < query_len)
    token_o = (start + first_query + row_o // GROUP).to(gl.int64)
    offset_o = (token_o * NUM_KV_HEADS * GROUP + kv_head * GROUP + row_o % GROUP) * D
    gl.store(
        out_ptr + gl.expand_dims(offset_o, 1) + gl.expand_dims(dim_o, 0),
        result.to(out_ptr.dtype.element_ty),
        mask=gl.expand_dims(mask_o, 1),
    )


@kernel(
    jit=gluon.jit,
    do_not_specialize=["first_request", "num_requests", "stride_table_request"],
    do_not_specialize_on_alignment=["block_table_ptr"],
)
def prefill_hopper_kernel(
    query_ptr,  # [num_tokens, num_kv_heads * GROUP, D]
    key_map,  # rows of [num_blocks, num_kv_heads, BLOCK_SIZE, D]
    value_map,  # rows of [num_blocks, num_kv_heads, BLOCK_SIZE, D]
    out_ptr,  # [num_tokens, num_kv_heads * GROUP, D]
    query_start_loc_ptr,  # [first_request + num_requests + 1]
    seq_lens_ptr,  # [first_request + num_requests]
    block_table_ptr,  # [first_request + num_requests, max_blocks]
    sinks_ptr,  # [num_kv_heads * GROUP]; None: no sinks
    first_request,
    num_requests,
    factor,
    stride_query_token,
    stride_query_head,
    stride_table_request,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    ROWS_PER_BLOCK: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    D: gl.constexpr,
    WINDOW: gl.constexpr,  # 0: no window
):
    # As in `prefill_attention_kernel`: late queries first, of all heads.
    kv_head = gl.program_id(0) % NUM_KV_HEADS
    block = (gl.num_programs(0) - 1 - gl.program_id(0)) // NUM_KV_HEADS
    starts_ptr = query_start_loc_ptr + first_request
    request = find_request(starts_ptr, block, num_requests, BLOCK_Q)
    start = gl.load(starts_ptr + request)
    query_len = gl.load(starts_ptr + request + 1) - start
    first_query = (block - (start - gl.load(starts_ptr)) // BLOCK_Q - request) * BLOCK_Q
    request += first_request
    context_len = gl.load(seq_lens_ptr + request) - query_len
    table_ptr = block_table_ptr + request.to(gl.int64) * stride_table_request
    end = context_len + gl.minimum(first_query + BLOCK_Q, query_len)
    first = 0
    if WINDOW > 0:
        first = gl.maximum(context_len + first_query - WINDOW + 1, 0)
    first_tile = first // TILE
    # None if the grid, an upper bound, has too many programs, or if these tokens lie before the request's beginning.
    has_keys = (first_query < query_len) & (end > 0)
    num_tiles = gl.where(has_keys, (end + TILE - 1) // TILE - first_tile, 0)
    num_full = 0
    if WINDOW == 0:
        num_full = (context_len + first_query + 1) // TILE

    ROWS: gl.constexpr = 64
    PARTS: gl.constexpr = D // _PART
    PIECES: gl.constexpr = STAGES * PARTS * (TILE // BLOCK_SIZE)
    # A tile of D = 128 is two halves of [TILE, 64], and each half the pieces that were copied, one behind the other.
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dtype: gl.constexpr = key_map.dtype
    queries = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, D], LAYOUT)
    pieces_k = gl.allocate_shared_memory(dtype, [PIECES, BLOCK_SIZE, _PART], key_map.layout)
    pieces_v = gl.allocate_shared_memory(dtype, [PIECES, BLOCK_SIZE, _PART], value_map.layout)
    tiles_k = pieces_k._reinterpret(dtype, [STAGES, TILE, D], LAYOUT)
    tiles_v = pieces_v._reinterpret(dtype, [STAGES, TILE, D], LAYOUT)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=CONSUMERS)
        mbarrier.init(v_free.index(stage), count=CONSUMERS)
    fence_async_shared()

    pointers = (query_ptr, out_ptr, sinks_ptr)
    buffers = (queries, tiles_k, tiles_v)
    barriers = (k_ready, k_free, v_ready, v_free)
    own = (start, query_len, context_len)
    tiles = (first_tile, num_full, num_tiles)
    strides = (stride_query_token, stride_query_head)
    columns = (first // BLOCK_SIZE, (end - 1) // BLOCK_SIZE)
    maps = (key_map, value_map)
    pieces = (pieces_k, pieces_v)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (
                    pointers, buffers, barriers, own, first_query, tiles, first, end, kv_head, factor, strides,
                    0, NUM_KV_HEADS, GROUP, BLOCK_Q, ROWS, TILE, STAGES, D, WINDOW,
                )),
                (_consume, (
                    pointers, buffers, barriers, own, first_query, tiles, first, end, kv_head, factor, strides,
                    1, NUM_KV_HEADS, GROUP, BLOCK_Q, ROWS, TILE, STAGES, D, WINDOW,
                )),
                (_produce, (
                    maps, pieces, barriers, table_ptr, tiles, columns, kv_head,
                    ROWS_PER_BLOCK, BLOCK_SIZE, TILE, STAGES, PARTS,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    pointers, buffers, barriers, own, first_query, tiles, first, end, kv_head, factor, strides,
                    0, NUM_KV_HEADS, GROUP, BLOCK_Q, ROWS, TILE, STAGES, D, WINDOW,
                )),
                (_produce, (
                    maps, pieces, barriers, table_ptr, tiles, columns, kv_head,
                    ROWS_PER_BLOCK, BLOCK_SIZE, TILE, STAGES, PARTS,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip
