"""Write keys and values to the paged KV cache as they are: for models that rotate keys themselves.

Grid: (tokens, blocks of KV heads).
"""

import torch
import triton.language as tl

from proa_engine.kernels.cache_rows import CacheRows, write_to_cache
from proa_engine.kernels.fp8 import FP8, ROUND_BEFORE, to_fp8, with_scale
from proa_engine.kernels.launch import kernel
from proa_engine.kernels.sizes import cdiv, next_power_of_2

BLOCK_HEADS = 8


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
    if rows is None:
        _store_kv_triton(key, value, key_cache, value_cache, slot_mapping)
        return
    if key_cache.dtype == FP8:
        key, value = with_scale(key, 1.0), with_scale(value, 1.0)
    write_to_cache(key, value, key_cache, value_cache, rows)


def _store_kv_triton(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
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
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
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
