"""Write a step's keys and values to their places in the paged KV cache. One program a token; all heads in one tile."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class CacheRows:
    """A step's slots as the CPU reads them: made once a step, used by every layer."""

    rows: torch.Tensor  # [tokens * kv_heads] int64: rows of a cache seen as [num_blocks * kv_heads * block_size, D]
    tokens: torch.Tensor | None  # int64: the tokens that are no padding; None: all


def cache_rows(slot_mapping: torch.Tensor, cache_shape: torch.Size) -> CacheRows:
    """`cache_shape` is that of the keys: [num_blocks, kv_heads, block_size, D]."""
    _, num_heads, block_size, _ = cache_shape
    tokens = None
    if bool((slot_mapping < 0).any()):
        tokens = (slot_mapping >= 0).nonzero().flatten()
        slot_mapping = slot_mapping[tokens]
    block = slot_mapping.div(block_size, rounding_mode="floor")
    first = block * (num_heads - 1) * block_size + slot_mapping
    rows = first[:, None] + torch.arange(0, num_heads * block_size, block_size)
    return CacheRows(rows.flatten(), tokens)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    rows: CacheRows | None = None,
) -> None:
    """key, value [T, kv_heads, D] go to caches [num_blocks, kv_heads, block_size, D].

    Token t's slot is block * block_size + offset; a slot of -1 is padding and written nowhere. `rows` spares the CPU
    to work the same slots out again.
    """
    if key.is_cuda:
        _reshape_and_cache_triton(key, value, key_cache, value_cache, slot_mapping)
    else:
        rows = rows or cache_rows(slot_mapping, key_cache.shape)
        reshape_and_cache_reference(key, value, key_cache, value_cache, rows)


def reshape_and_cache_reference(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, rows: CacheRows
) -> None:
    if rows.tokens is not None:
        key, value = key[rows.tokens], value[rows.tokens]
    if key_cache.itemsize == 1:  # torch copies no rows of 8-bit floats, but of bytes
        key, value, key_cache, value_cache = (each.view(torch.uint8) for each in (key, value, key_cache, value_cache))
    head_dim = key.shape[-1]
    key_cache.view(-1, head_dim).index_copy_(0, rows.rows, key.reshape(-1, head_dim))
    value_cache.view(-1, head_dim).index_copy_(0, rows.rows, value.reshape(-1, head_dim))


def _reshape_and_cache_triton(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    num_tokens, num_heads, head_dim = key.shape
    assert key.stride(-1) == 1
    assert value.stride(-1) == 1
    assert key_cache.stride() == value_cache.stride()
    reshape_and_cache_kernel[(num_tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        num_heads,
        head_dim,
        key_cache.shape[2],
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
        BLOCK_DIM=triton.next_power_of_2(head_dim),
    )


@triton.jit
def reshape_and_cache_kernel(
    key_ptr,  # [num_tokens, num_heads, head_dim]
    value_ptr,  # [num_tokens, num_heads, head_dim]
    key_cache_ptr,  # [num_blocks, num_heads, block_size, head_dim]
    value_cache_ptr,  # [num_blocks, num_heads, block_size, head_dim]
    slot_mapping_ptr,  # [num_tokens] int64
    num_heads,
    head_dim,
    block_size,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_cache_block,
    stride_cache_head,
    stride_cache_slot,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:  # padding
        return
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_DIM)[None, :]
    mask = (head < num_heads) & (column < head_dim)
    # [BLOCK_HEADS, BLOCK_DIM]
    key = tl.load(key_ptr + token * stride_key_token + head * stride_key_head + column, mask=mask)
    value = tl.load(value_ptr + token * stride_value_token + head * stride_value_head + column, mask=mask)
    block, offset = slot // block_size, slot % block_size
    place = block * stride_cache_block + head * stride_cache_head + offset * stride_cache_slot + column
    tl.store(key_cache_ptr + place, key, mask=mask)
    tl.store(value_cache_ptr + place, value, mask=mask)
