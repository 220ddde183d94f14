"""One tile of attention over the paged KV cache, in Triton: what the decode and the prefill kernel do in their loops.

Online softmax (Milakov & Gimelshein, 2018; FlashAttention-2, arXiv 2307.08691) in powers of 2, with a float32 state:
of each row the largest score so far, the sum of the weights and the weighted sum of values, both relative to it.
float32 inputs are multiplied as three tf32 products each, which keeps their precision and uses the tensor cores.
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def attend_tile(
    query,  # [BLOCK_M, BLOCK_D]
    maximum,  # [BLOCK_M] float32, as `total` and `acc` the state
    total,  # [BLOCK_M]
    acc,  # [BLOCK_M, BLOCK_D]
    position,  # [BLOCK_M]: of each row's query in its request
    tile,  # first token of the tile
    first,  # first token that any row may attend to; used if there is a window
    end,  # end of the tokens that any row may attend to
    key_cache_ptr,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    value_cache_ptr,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    table_ptr,  # [max_blocks]: the request's row
    kv_head,
    scale_log2,  # scale * log2(e)
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: no window
    MASKED: tl.constexpr,  # False: every row attends to the whole tile
):
    key_position = tile + tl.arange(0, TILE)
    dim = tl.arange(0, BLOCK_D)
    # [TILE, BLOCK_D]; tokens that no row may attend to are read as zeros, because they may be NaN
    if MASKED:
        is_read = key_position < end
        if WINDOW > 0:
            is_read = is_read & (key_position >= first)
        physical = tl.load(table_ptr + key_position // BLOCK_SIZE, mask=is_read, other=0)
        mask = is_read[:, None] & (dim < HEAD_DIM)[None, :]
    else:
        physical = tl.load(table_ptr + key_position // BLOCK_SIZE)
        mask = (dim < HEAD_DIM)[None, :]
    place = ((physical.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + key_position % BLOCK_SIZE) * HEAD_DIM
    if MASKED or HEAD_DIM != BLOCK_D:
        key = tl.load(key_cache_ptr + place[:, None] + dim[None, :], mask=mask, other=0.0)
        value = tl.load(value_cache_ptr + place[:, None] + dim[None, :], mask=mask, other=0.0)
    else:
        key = tl.load(key_cache_ptr + place[:, None] + dim[None, :])
        value = tl.load(value_cache_ptr + place[:, None] + dim[None, :])
    key = key.to(query.dtype)  # from 8-bit floats, if the cache holds them
    value = value.to(query.dtype)
    # [BLOCK_M, TILE]
    scores = tl.dot(query, tl.trans(key), input_precision="tf32x3") * scale_log2
    if MASKED:
        visible = (key_position[None, :] <= position[:, None]) & (key_position < end)[None, :]
        if WINDOW > 0:
            visible = visible & (key_position[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    # For a row without any visible token so far -inf - -inf would be NaN.
    safe_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum) if MASKED else new_maximum
    weights = tl.exp2(scores - safe_maximum[:, None])
    rescale = tl.exp2(maximum - safe_maximum)
    total = total * rescale + tl.sum(weights, axis=1)
    acc = acc * rescale[:, None]
    acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="tf32x3")
    return new_maximum, total, acc


@triton.jit
def store_rows(out_ptr, offset, mask, total, acc, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store each row's result at its offset; zeros for a row that has seen nothing."""
    dim = tl.arange(0, BLOCK_D)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + offset[:, None] + dim[None, :], result, mask=mask[:, None] & (dim < HEAD_DIM)[None, :])
