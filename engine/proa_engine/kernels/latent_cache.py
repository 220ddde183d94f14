"""The cached rows of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): a normalised latent of keys and
values, and one rotated key for all heads."""

import torch
import triton.language as tl

from proa_engine.kernels.launch import kernel
from proa_engine.kernels.rms_norm import rms_norm_reference
from proa_engine.kernels.rotate_and_cache import rotate
from proa_engine.kernels.sizes import next_power_of_2


def cache_latents(
    compressed: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool,
) -> None:
    """Write rows of compressed [T, rank + rope_dim] to cache [num_blocks, block_size, rank + rope_dim].

    Their first `rank` values are normalised with the weight [rank] and epsilon of `norm`; the others are rotated by
    cos, sin [T, rope_dim] float32, as `rotate_part` does. Token t's slot is block * block_size + offset; slot -1 is
    padding and is not written.
    """
    write = cache_latents_reference if compressed.is_cpu else _cache_latents_triton
    write(compressed, norm, cos, sin, cache, slot_mapping, interleaved=interleaved)


def cache_latents_reference(
    compressed: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool,
) -> None:
    weight, eps = norm
    latent = rms_norm_reference(compressed[:, : len(weight)].contiguous(), weight, eps)
    key = rotate_part(compressed[:, None, len(weight) :], cos, sin, interleaved=interleaved)[:, 0]
    rows = torch.cat((latent, key), dim=-1).to(cache.dtype)
    is_token = slot_mapping >= 0
    cache.view(-1, rows.shape[1]).index_copy_(0, slot_mapping[is_token], rows[is_token])


def rotate_part(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate x [T, heads, rope_dim]. `interleaved`: the pairs are neighbours; they come out as halves, so queries and
    keys must both be rotated so."""
    if interleaved:
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return rotate(x, cos, sin)


def _cache_latents_triton(
    compressed: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool,
) -> None:
    weight, eps = norm
    num_tokens, row_size = compressed.shape
    rank = len(weight)
    assert compressed.stride(1) == 1
    assert cache.is_contiguous()
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    cache_latents_kernel[(num_tokens,)](
        compressed,
        weight,
        cos,
        sin,
        cache,
        slot_mapping,
        compressed.stride(0),
        eps,
        RANK=rank,
        HALF=(row_size - rank) // 2,
        BLOCK_RANK=next_power_of_2(rank),
        BLOCK_HALF=next_power_of_2((row_size - rank) // 2),
        INTERLEAVED=interleaved,
        num_warps=4,
    )


@kernel(do_not_specialize_on_alignment=["compressed_ptr", "cos_ptr", "sin_ptr"])
def cache_latents_kernel(
    compressed_ptr,  # [num_tokens, RANK + 2 * HALF]
    weight_ptr,  # [RANK]
    cos_ptr,  # [num_tokens, 2 * HALF] float32
    sin_ptr,  # [num_tokens, 2 * HALF] float32
    cache_ptr,  # [num_slots, RANK + 2 * HALF]
    slot_mapping_ptr,  # [num_tokens] int64
    stride_token,
    eps,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    row_ptr = compressed_ptr + token * stride_token
    out_ptr = cache_ptr + slot * (RANK + 2 * HALF)
    column = tl.arange(0, BLOCK_RANK)
    # [BLOCK_RANK]
    latent = tl.load(row_ptr + column, mask=column < RANK, other=0.0)
    wide = latent.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide) / RANK + eps)
    weight = tl.load(weight_ptr + column, mask=column < RANK, other=0.0).to(tl.float32)
    tl.store(out_ptr + column, normed * weight, mask=column < RANK)
    pair = tl.arange(0, BLOCK_HALF)
    is_pair = pair < HALF
    first = RANK + (2 * pair if INTERLEAVED else pair)
    second = first + (1 if INTERLEAVED else HALF)
    # [BLOCK_HALF]
    x = tl.load(row_ptr + first, mask=is_pair, other=0.0).to(tl.float32)
    y = tl.load(row_ptr + second, mask=is_pair, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * 2 * HALF + pair, mask=is_pair, other=0.0)
    sin = tl.load(sin_ptr + token * 2 * HALF + HALF + pair, mask=is_pair, other=0.0)
    tl.store(out_ptr + RANK + pair, x * cos - y * sin, mask=is_pair)
    tl.store(out_ptr + RANK + HALF + pair, y * cos + x * sin, mask=is_pair)
