"""Split merged projections, normalise q and k by head (if the model does), rotate them, and write keys and values to
the paged KV cache, in one kernel.

Grid: (tokens, blocks of heads). A program computes the same for queries, keys and values and selects what to store.
"""

import torch
import triton.language as tl

from proa_engine.kernels.attention.store_kv import CacheRows, block_stride, cache_rows, write_to_cache
from proa_engine.kernels.fp8 import FP8, ROUND_BEFORE, to_fp8, with_scale
from proa_engine.kernels.launch import INTERPRETED, begin, cdiv, kernel, next_power_of_2
from proa_engine.kernels.rms_norm import rms_norm_reference

BLOCK_HEADS = 8


def rotate_and_cache(
    heads: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    rows: CacheRows | None = None,
    cache_scales: tuple[float, float] = (1.0, 1.0),
    *,
    interleaved: bool = False,
    norm_values: bool = False,
) -> torch.Tensor:
    """heads [T, q heads + 2 * kv_heads, D], queries then keys then values -> rotated queries [T, q heads, D]. A token's
    heads are contiguous.

    Keys and values are written to caches [num_blocks, kv_heads, block_size, D], of the same strides and contiguous in a
    block. Token t's slot is block * block_size + offset; slot -1 is padding and is not written. `rows` holds the same
    slots as row indices on a CPU. If the cache holds 8-bit floats, keys and values are divided by `cache_scales`.

    `norms` are the weights [D] for q and for k, and epsilon; a model whose weight counts from 1 adds 1 to it when it is
    loaded. With `norm_values` values are normalised too, without a weight.

    cos, sin [T, R] float32 hold the R/2 angles' values twice, sin with its first half negated. Only the first R of a
    head's values are rotated: i with i + R/2, or 2 * i with 2 * i + 1 if `interleaved`. A layer without rotation takes
    cos = 1 and sin = 0, which changes no bit.
    """
    if heads.is_cpu and not INTERPRETED:
        rows = rows or cache_rows(slot_mapping, key_cache.shape, key_cache.stride(0))
        variant = cache_scales, interleaved, norm_values
        return rotate_and_cache_reference(heads, norms, cos, sin, key_cache, value_cache, rows, *variant)
    num_tokens, num_all_heads, head_dim = heads.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    num_heads = num_all_heads - 2 * num_kv_heads
    assert heads.stride()[1:] == (head_dim, 1)
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    query = torch.empty(num_tokens, num_heads, head_dim, dtype=heads.dtype, device=heads.device)
    q_weight, k_weight, eps = norms or (None, None, 0.0)
    rotate_and_cache_kernel[(num_tokens, cdiv(num_all_heads, BLOCK_HEADS))](
        heads,
        q_weight,
        k_weight,
        cos,
        sin,
        query,
        key_cache,
        value_cache,
        slot_mapping,
        heads.stride(0),
        eps,
        1.0 / cache_scales[0],
        1.0 / cache_scales[1],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        HALF_ROTATED=cos.shape[1] // 2,
        INTERLEAVED=interleaved,
        BLOCK_SIZE=block_size,
        BLOCK_STRIDE=block_stride(key_cache, value_cache),
        HAS_NORMS=norms is not None,
        NORM_VALUES=norms is not None and norm_values,
        FP8_CACHE=key_cache.dtype == FP8,
        ROUND=ROUND_BEFORE,
        BLOCK_HEADS=BLOCK_HEADS,
        BLOCK_HALF=next_power_of_2(head_dim // 2),
        num_warps=4,
    )
    return query


def rotate_and_cache_reference(
    heads: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    rows: CacheRows,
    cache_scales: tuple[float, float] = (1.0, 1.0),
    interleaved: bool = False,
    norm_values: bool = False,
) -> torch.Tensor:
    num_kv_heads = key_cache.shape[1]
    num_heads = heads.shape[1] - 2 * num_kv_heads
    num_rotated = num_heads + num_kv_heads
    value = heads[:, num_rotated:]
    if norms is None:
        rotated = rotate(heads[:, :num_rotated], cos, sin, interleaved)
        query, key = rotated[:, :num_heads], rotated[:, num_heads:]
    else:
        q_weight, k_weight, eps = norms
        query = rotate(rms_norm_reference(heads[:, :num_heads], q_weight, eps), cos, sin, interleaved)
        key = rotate(rms_norm_reference(heads[:, num_heads:num_rotated], k_weight, eps), cos, sin, interleaved)
        if norm_values:
            value = rms_norm_reference(value, torch.ones_like(k_weight), eps)
    if key_cache.dtype == FP8:
        key, value = with_scale(key, cache_scales[0]), with_scale(value, cache_scales[1])
    write_to_cache(key, value, key_cache, value_cache, rows)
    return query


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate pairs of x [T, heads, D], as `rotate_and_cache` describes, by their angles (RoPE, Su et al. 2021, arXiv
    2104.09864). cos, sin [T, R]"""
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], cos, sin, interleaved), x[..., size:]), dim=-1)
    if interleaved:
        cos, sin = (table.view(-1, 2, size // 2).transpose(1, 2).flatten(1) for table in (cos, sin))
        swapped = x.view(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
    else:
        swapped = x.roll(size // 2, dims=-1)
    return (x * cos[:, None] + swapped * sin[:, None]).to(x.dtype)


@kernel
def rotate_and_cache_kernel(
    heads_ptr,  # [num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, 2 * HALF]
    q_weight_ptr,  # [2 * HALF]
    k_weight_ptr,  # [2 * HALF]
    cos_ptr,  # [num_tokens, 2 * HALF_ROTATED]
    sin_ptr,  # [num_tokens, 2 * HALF_ROTATED]: here the second half is read, which has its own sign
    query_ptr,  # [num_tokens, NUM_HEADS, 2 * HALF]
    key_cache_ptr,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, 2 * HALF]
    value_cache_ptr,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, 2 * HALF]
    slot_mapping_ptr,  # [num_tokens] int64
    stride_heads_token,
    eps,
    key_factor,  # 1 / scale of a cache of 8-bit floats
    value_factor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,  # rotated pairs are of neighbours
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    NORM_VALUES: tl.constexpr,
    FP8_CACHE: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    is_pair = pair < HALF
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    mask = (is_query | is_key | is_value) & is_pair
    # A pair's values in the head: `index` and `index + gap`. Pairs of values that are not rotated come last.
    index = pair
    gap = HALF
    if INTERLEAVED:
        index = tl.where(pair < HALF_ROTATED, 2 * pair, pair + HALF_ROTATED)
        gap = tl.where(pair < HALF_ROTATED, 1, HALF - HALF_ROTATED)
    elif HALF_ROTATED < HALF:
        index = tl.where(pair < HALF_ROTATED, pair, pair + HALF_ROTATED)
        gap = tl.where(pair < HALF_ROTATED, HALF_ROTATED, HALF - HALF_ROTATED)
    # [BLOCK_HEADS, BLOCK_HALF]
    place = token * stride_heads_token + head * 2 * HALF + index
    first = tl.load(heads_ptr + place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(heads_ptr + place + gap, mask=mask, other=0.0).to(tl.float32)
    normed_first = first
    normed_second = second
    if HAS_NORMS:
        scale = 1.0 / tl.sqrt(tl.sum(first * first + second * second, axis=1) / (2 * HALF) + eps)
        # [1, BLOCK_HALF]
        q_first = tl.load(q_weight_ptr + index, mask=is_pair, other=0.0).to(tl.float32)
        q_second = tl.load(q_weight_ptr + index + gap, mask=is_pair, other=0.0).to(tl.float32)
        k_first = tl.load(k_weight_ptr + index, mask=is_pair, other=0.0).to(tl.float32)
        k_second = tl.load(k_weight_ptr + index + gap, mask=is_pair, other=0.0).to(tl.float32)
        normed_first = first * scale[:, None] * tl.where(is_query, q_first, k_first)
        normed_second = second * scale[:, None] * tl.where(is_query, q_second, k_second)
        if NORM_VALUES:
            # Rounded to the heads' type before they are quantized, as in the reference.
            first = (first * scale[:, None]).to(heads_ptr.dtype.element_ty).to(tl.float32)
            second = (second * scale[:, None]).to(heads_ptr.dtype.element_ty).to(tl.float32)
    is_rotated = pair < HALF_ROTATED
    cos = tl.load(cos_ptr + token * 2 * HALF_ROTATED + pair, mask=is_rotated, other=1.0)
    sin = tl.load(sin_ptr + (token * 2 + 1) * HALF_ROTATED + pair, mask=is_rotated, other=0.0)
    rotated_first = normed_first * cos - normed_second * sin
    rotated_second = normed_second * cos + normed_first * sin

    query_place = (token * NUM_HEADS + head) * 2 * HALF + index
    tl.store(query_ptr + query_place, rotated_first, mask=is_query & is_pair)
    tl.store(query_ptr + query_place + gap, rotated_second, mask=is_query & is_pair)
    slot = tl.load(slot_mapping_ptr + token)
    is_written = is_pair & (slot >= 0)  # not padding
    kv_head = tl.where(is_key, head - NUM_HEADS, head - NUM_HEADS - NUM_KV_HEADS)
    place_in_block = (kv_head * BLOCK_SIZE + slot % BLOCK_SIZE) * 2 * HALF + index
    cache_place = slot // BLOCK_SIZE * BLOCK_STRIDE + place_in_block
    if FP8_CACHE:
        # Rounded to the heads' type first, as keys of an unquantized cache are.
        rotated_first = to_fp8(rotated_first.to(heads_ptr.dtype.element_ty).to(tl.float32) * key_factor, ROUND)
        rotated_second = to_fp8(rotated_second.to(heads_ptr.dtype.element_ty).to(tl.float32) * key_factor, ROUND)
        first = to_fp8(first * value_factor, ROUND)
        second = to_fp8(second * value_factor, ROUND)
    tl.store(key_cache_ptr + cache_place, rotated_first, mask=is_key & is_written)
    tl.store(key_cache_ptr + cache_place + gap, rotated_second, mask=is_key & is_written)
    tl.store(value_cache_ptr + cache_place, first, mask=is_value & is_written)
    tl.store(value_cache_ptr + cache_place + gap, second, mask=is_value & is_written)
