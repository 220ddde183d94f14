"""One tile of attention over the paged KV cache, in Triton: what the decode and the prefill kernel do in their loops.

Online softmax (Milakov & Gimelshein, 2018; FlashAttention-2, arXiv 2307.08691) in powers of 2, with a float32 state:
of each row the largest score so far, the sum of the weights and the weighted sum of values, both relative to it.
float32 inputs are multiplied as three tf32 products each, which keeps their precision and uses the tensor cores.

A soft cap (Gemma 2) replaces a score s by cap * tanh(s / cap). An attention sink (gpt-oss) is a score without a key and
a value: it only adds to the sum of the weights.
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)  # for kernels


def score_factors(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """Return what `attend_tile` takes as `factor` and as SOFT_CAP."""
    if soft_cap is None:
        return scale * LOG2_E, 0.0
    return 2 * scale / soft_cap * LOG2_E, soft_cap * LOG2_E


@triton.jit
def load_tile(
    is_read,  # [TILE]: tokens to read; all if not MASKED
    tile,
    key_cache_ptr,  # these as for `attend_tile`
    value_cache_ptr,
    table_ptr,
    kv_head,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return a tile's keys and values [TILE, BLOCK_D], zeros for tokens that are not read: these may be NaN."""
    lane = tl.arange(0, TILE)
    if TILE % BLOCK_SIZE == 0:  # the tile begins with a block, so most of the arithmetic is done before the loop
        block, place_in_block = tile // BLOCK_SIZE + lane // BLOCK_SIZE, lane % BLOCK_SIZE
    else:
        block, place_in_block = (tile + lane) // BLOCK_SIZE, (tile + lane) % BLOCK_SIZE
    dim = tl.arange(0, BLOCK_D)
    if MASKED:
        physical = tl.load(table_ptr + block, mask=is_read, other=0)
        mask = is_read[:, None] & (dim < HEAD_DIM)[None, :]
    else:
        physical = tl.load(table_ptr + block)
        mask = (dim < HEAD_DIM)[None, :]
    place = physical.to(tl.int64) * BLOCK_STRIDE + (kv_head * BLOCK_SIZE + place_in_block) * HEAD_DIM
    if MASKED or HEAD_DIM != BLOCK_D:
        key = tl.load(key_cache_ptr + place[:, None] + dim[None, :], mask=mask, other=0.0)
        value = tl.load(value_cache_ptr + place[:, None] + dim[None, :], mask=mask, other=0.0)
    else:
        key = tl.load(key_cache_ptr + place[:, None] + dim[None, :])
        value = tl.load(value_cache_ptr + place[:, None] + dim[None, :])
    return key, value


@triton.jit
def load_part_tile(
    is_read,  # [TILE]: tokens before `end`
    tile,
    start,  # of the part, a multiple of BLOCK_SIZE
    end,
    key_cache_ptr,  # these as for `attend_tile`
    value_cache_ptr,
    table_ptr,
    kv_head,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # a divisor of TILE
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return a tile's keys and values [TILE, BLOCK_D], those of tokens in the part's first block in place of those
    behind `end`, which may be NaN.

    A copy then needs no mask but that of its half of the tile, and what depends on a token's place in its block is
    computed before the loop. The second half is zeros, and not read, if it begins behind `end`.
    """
    lane = tl.arange(0, TILE)
    dim = tl.arange(0, BLOCK_D)
    first_block = tl.cast(tile, tl.uint32) // BLOCK_SIZE  # no sign, which would take instructions
    block = tl.where(is_read, first_block + lane // BLOCK_SIZE, start // BLOCK_SIZE)
    place_in_block = tl.minimum(lane % BLOCK_SIZE, end - start - 1)  # a short part ends within its first block
    place = ((kv_head * BLOCK_SIZE + place_in_block) * HEAD_DIM)[:, None] + dim[None, :]
    offset = (tl.load(table_ptr + block).to(tl.int64) * BLOCK_STRIDE)[:, None]
    half: tl.constexpr = TILE // 2
    mask = (lane // half * half < end - tile)[:, None] & (dim < HEAD_DIM)[None, :]
    key = tl.load(key_cache_ptr + place + offset, mask=mask, other=0.0)
    value = tl.load(value_cache_ptr + place + offset, mask=mask, other=0.0)
    return key, value


@triton.jit
def attend_tile(
    query,  # [BLOCK_M, BLOCK_D]
    maximum,  # [BLOCK_M] float32, as `total` and `acc` the state
    total,  # [BLOCK_M]; [BLOCK_M, TILE], a sum for each lane, if BY_LANE
    acc,  # [BLOCK_M, BLOCK_D]
    position,  # [BLOCK_M]: of each row's query in its request; None: every row attends from `first` to `end`
    ends,  # [BLOCK_M]: the end of the tokens that each row attends to; None: its own position + 1
    tile,  # first token of the tile, a multiple of TILE
    start,  # first token of the part; used if BY_PART
    first,  # first token that any row may attend to; used if there is a window
    end,  # end of the tokens that any row may attend to
    key_cache_ptr,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    value_cache_ptr,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    table_ptr,  # [max_blocks]: the request's row
    kv_head,
    factor,  # scale * log2(e); with a soft cap 2 / cap times as much: the exponent of 2 in exp(2 * score / cap)
    BLOCK_STRIDE: tl.constexpr,  # of both caches
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: no window
    SOFT_CAP: tl.constexpr,  # cap * log2(e); 0: none
    MASKED: tl.constexpr,  # False: every row attends to the whole tile
    BY_PART: tl.constexpr = False,  # whether `load_part_tile` loads the tile: then MASKED, without a window
    BY_LANE: tl.constexpr = False,  # whether the caller adds up the weights of a row's lanes, which takes a barrier
):
    lane = tl.arange(0, TILE)
    key_position = tile + lane
    caches = key_cache_ptr, value_cache_ptr, table_ptr, kv_head
    if BY_PART:
        is_read = lane < end - tile
        key, value = load_part_tile(
            is_read, tile, start, end, *caches, BLOCK_STRIDE, HEAD_DIM, BLOCK_SIZE, BLOCK_D, TILE
        )
    else:
        is_read = key_position < end
        if WINDOW > 0:
            is_read = is_read & (key_position >= first)
        key, value = load_tile(is_read, tile, *caches, BLOCK_STRIDE, HEAD_DIM, BLOCK_SIZE, BLOCK_D, TILE, MASKED)
    key = key.to(query.dtype)  # from 8-bit floats, if the cache holds them
    value = value.to(query.dtype)
    # [BLOCK_M, TILE]
    scores = tl.dot(query, tl.trans(key), input_precision="tf32x3") * factor
    if SOFT_CAP > 0:
        scores = SOFT_CAP - 2 * SOFT_CAP / (1.0 + tl.exp2(scores))  # tanh(x) = 1 - 2 / (1 + exp(2 * x))
    if MASKED:
        if position is None:
            visible = is_read[None, :]
        elif ends is None:
            visible = (key_position[None, :] <= position[:, None]) & (key_position < end)[None, :]
        else:
            visible = key_position[None, :] < ends[:, None]
        if WINDOW > 0 and position is not None:
            visible = visible & (key_position[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    safe_maximum = new_maximum
    if MASKED and (WINDOW > 0 or position is not None):
        # For a row without any visible token so far -inf - -inf would be NaN.
        safe_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(scores - safe_maximum[:, None])
    rescale = tl.exp2(maximum - safe_maximum)
    total = total * rescale[:, None] + weights if BY_LANE else total * rescale + tl.sum(weights, axis=1)
    acc = acc * rescale[:, None]
    acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="tf32x3")
    return new_maximum, total, acc


@triton.jit
def first_state(sinks_ptr, head, has_sink, BLOCK_M: tl.constexpr):
    """Return maximum and total of rows that have seen no token, but their head's sink where `has_sink` [BLOCK_M]."""
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=has_sink, other=float("-inf"))
        maximum = sink.to(tl.float32) * _LOG2_E
        total = tl.where(maximum == float("-inf"), 0.0, 1.0)
    return maximum, total


@triton.jit
def store_rows(out_ptr, offset, mask, total, acc, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store each row's result at its offset; zeros for a row that has seen nothing."""
    dim = tl.arange(0, BLOCK_D)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + offset[:, None] + dim[None, :], result, mask=mask[:, None] & (dim < HEAD_DIM)[None, :])
