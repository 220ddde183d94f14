"""The paged KV cache's memory, and writing keys and values to it as they are: for models that rotate keys themselves.

Blocks are contiguous, at equal distances. On a CPU a step's slots are row indices (`CacheRows`). On a GPU the grid is
(tokens, blocks of KV heads).
"""

from dataclasses import dataclass

import torch
import triton.language as tl

from proa_engine.kernels.fp8 import FP8, ROUND_BEFORE, to_fp8, with_scale
from proa_engine.kernels.launch import begin, cdiv, kernel, next_power_of_2

# Arguments of `as_strided` that view a cache as rows of its memory, whatever is between its blocks: shape and strides.
RowsView = tuple[tuple[int, int], tuple[int, int]]

BLOCK_HEADS = 8


def block_stride(key_cache: torch.Tensor, value_cache: torch.Tensor) -> int:
    """Return the elements from one block to the next, the same in both caches [num_blocks, kv_heads, block_size, D]."""
    stride, *inner = key_cache.stride()
    _, _, block_size, head_dim = key_cache.shape
    assert inner == [block_size * head_dim, head_dim, 1]
    assert value_cache.stride() == key_cache.stride()
    return stride


def rows_view(cache_shape: torch.Size, block_stride: int | None, width: int) -> RowsView:
    """The rows of `width` elements of a cache [num_blocks, kv_heads, block_size, D], from its beginning to its end.

    `block_stride`: elements from one block to the next; None: the cache is contiguous. `width` divides it, and is D or
    block_size * D.
    """
    size = cache_shape[1:].numel()
    stride = size if block_stride is None else block_stride
    assert stride % width == 0
    end = (cache_shape[0] - 1) * stride + size if size else 0  # without KV heads there are no rows
    return (end // width, width), (width, 1)


@dataclass(frozen=True, slots=True)
class CacheRows:
    """The slots of a step's tokens: computed once a step, used by every layer."""

    rows: torch.Tensor  # [tokens * kv_heads] int64: rows of `view`
    tokens: torch.Tensor | None  # int64: the tokens that are not padding; None: all
    view: RowsView  # of a cache, rows of D


def cache_rows(slot_mapping: torch.Tensor, cache_shape: torch.Size, block_stride: int | None = None) -> CacheRows:
    """Convert slots [T] int64 to row indices. `cache_shape`: that of the keys, [num_blocks, kv_heads, block_size, D].
    `block_stride`, a multiple of D: elements from one block to the next; None: the cache is contiguous."""
    _, num_heads, block_size, head_dim = cache_shape
    rows_per_block = num_heads * block_size if block_stride is None else block_stride // head_dim
    tokens = None
    if bool((slot_mapping < 0).any()):
        tokens = (slot_mapping >= 0).nonzero().flatten()
        slot_mapping = slot_mapping[tokens]
    block = slot_mapping.div(block_size, rounding_mode="floor")
    first = block * (rows_per_block - block_size) + slot_mapping
    rows = first[:, None] + torch.arange(0, num_heads * block_size, block_size)
    return CacheRows(rows.flatten(), tokens, rows_view(cache_shape, block_stride, head_dim))


def write_to_cache(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, rows: CacheRows
) -> None:
    """Write key and value [T, kv_heads, D] to their caches [num_blocks, kv_heads, block_size, D], in place."""
    if rows.tokens is not None:
        key, value = key[rows.tokens], value[rows.tokens]
    if key_cache.itemsize == 1:  # torch cannot copy rows of 8-bit floats; it copies bytes
        key, value, key_cache, value_cache = (each.view(torch.uint8) for each in (key, value, key_cache, value_cache))
    head_dim = key.shape[-1]
    key_cache.as_strided(*rows.view).index_copy_(0, rows.rows, key.reshape(-1, head_dim))
    value_cache.as_strided(*rows.view).index_copy_(0, rows.rows, value.reshape(-1, head_dim))


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    rows: CacheRows | None,
) -> None:
    """Write key, value [T, kv_heads, D] to their caches [num_blocks, kv_heads, block_size, D], in place.

    Token t's slot is block * block_size + offset; slot -1 is padding and is not written. `rows` holds the same slots as
    row indices; it is needed on a CPU only. A cache of 8-bit floats gets the values without a scale.
    """
    if rows is not None:
        if key_cache.dtype == FP8:
            key, value = with_scale(key, 1.0), with_scale(value, 1.0)
        write_to_cache(key, value, key_cache, value_cache, rows)
        return
    num_tokens, num_kv_heads, head_dim = key.shape
    assert key.stride(-1) == 1
    assert value.stride(-1) == 1
    assert key_cache[0].is_contiguous()
    assert value_cache[0].is_contiguous()
    assert key_cache.stride(0) == value_cache.stride(0)
    store_kv_kernel[(num_tokens, cdiv(num_kv_heads, BLOCK_HEADS))](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        key_cache.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key_cache.shape[2],
        FP8_CACHE=key_cache.dtype == FP8,
        ROUND=ROUND_BEFORE,
        BLOCK_HEADS=BLOCK_HEADS,
        BLOCK_D=next_power_of_2(head_dim),
        num_warps=4,
    )


@kernel
def store_kv_kernel(
    key_ptr,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM]
    value_ptr,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM]
    key_cache_ptr,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    value_cache_ptr,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    slot_mapping_ptr,  # [num_tokens] int64
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_cache_block,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FP8_CACHE: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    slot = tl.load(slot_mapping_ptr + token)
    mask = (head < NUM_KV_HEADS) & (dim < HEAD_DIM) & (slot >= 0)  # not padding
    # [BLOCK_HEADS, BLOCK_D]
    key = tl.load(key_ptr + token * stride_key_token + head * stride_key_head + dim, mask=mask, other=0.0)
    value = tl.load(value_ptr + token * stride_value_token + head * stride_value_head + dim, mask=mask, other=0.0)
    if FP8_CACHE:
        key = to_fp8(key.to(tl.float32), ROUND)
        value = to_fp8(value.to(tl.float32), ROUND)
    place = slot // BLOCK_SIZE * stride_cache_block + (head * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM + dim
    tl.store(key_cache_ptr + place, key, mask=mask)
    tl.store(value_cache_ptr + place, value, mask=mask)
