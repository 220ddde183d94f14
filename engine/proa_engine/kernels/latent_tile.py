"""Attention of a program's queries to a range of latent rows, in Triton: what the decode and the prefill kernel share.

The state is that of `attention_tile`.
"""

import triton
import triton.language as tl


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
        row = cache_ptr + ((physical * BLOCK_SIZE + key_position % BLOCK_SIZE) * (RANK + ROPE_DIM))[:, None]
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
