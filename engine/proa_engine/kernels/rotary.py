"""Rotary position embedding (Su et al., 2021, arXiv 2104.09864): turn each pair (x[i], x[i + D/2]) by its angle.

One program a token; all heads in one tile. Knows nothing of how the angles are made.
"""

import torch
import triton
import triton.language as tl


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] -> [T, heads, D] in x's type.

    cos, sin [T, D] float32 hold D/2 angles' values twice, in sin with the first half's sign turned.
    """
    return _rotary_triton(x, cos, sin) if x.is_cuda else rotary_reference(x, cos, sin)


def rotary_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return (x * cos[:, None] + swapped * sin[:, None]).to(x.dtype)


def _rotary_triton(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    num_tokens, num_heads, head_dim = x.shape
    assert x.stride(-1) == 1
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rotary_kernel[(num_tokens,)](
        x,
        cos,
        sin,
        out,
        num_heads,
        head_dim // 2,
        x.stride(0),
        x.stride(1),
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
    )
    return out


@triton.jit
def rotary_kernel(
    x_ptr,  # [num_tokens, num_heads, 2 * half]
    cos_ptr,  # [num_tokens, 2 * half]
    sin_ptr,  # [num_tokens, 2 * half]: here the second half is read, which has its own sign
    out_ptr,  # [num_tokens, num_heads, 2 * half]
    num_heads,
    half,
    stride_x_token,
    stride_x_head,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (head < num_heads) & (pair < half)
    # [1, BLOCK_HALF]
    cos = tl.load(cos_ptr + token * 2 * half + pair, mask=pair < half, other=0.0)
    sin = tl.load(sin_ptr + (token * 2 + 1) * half + pair, mask=pair < half, other=0.0)
    # [BLOCK_HEADS, BLOCK_HALF]
    x_offsets = token * stride_x_token + head * stride_x_head + pair
    first = tl.load(x_ptr + x_offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + x_offsets + half, mask=mask, other=0.0).to(tl.float32)
    out_offsets = (token * num_heads + head) * 2 * half + pair
    tl.store(out_ptr + out_offsets, first * cos - second * sin, mask=mask)
    tl.store(out_ptr + out_offsets + half, second * cos + first * sin, mask=mask)
