"""Sum the experts' outputs of each token, in the order of choice. One program for each token and block of outputs."""

import torch
import triton.language as tl

from proa_engine.kernels.launch import kernel
from proa_engine.kernels.sizes import cdiv

BLOCK = 1024


def combine_pairs(pairs: torch.Tensor) -> torch.Tensor:
    """pairs [T, k, N] -> [T, N]"""
    return combine_pairs_reference(pairs) if pairs.is_cpu else _combine_pairs_triton(pairs)


def combine_pairs_reference(pairs: torch.Tensor) -> torch.Tensor:
    total = pairs[:, 0].float()
    for choice in range(1, pairs.shape[1]):
        total = total + pairs[:, choice]
    return total.to(pairs.dtype)


def _combine_pairs_triton(pairs: torch.Tensor) -> torch.Tensor:
    num_tokens, k, size = pairs.shape
    assert pairs.is_contiguous()
    out = torch.empty((num_tokens, size), dtype=pairs.dtype, device=pairs.device)
    grid = (num_tokens, cdiv(size, BLOCK))
    combine_pairs_kernel[grid](pairs, out, size, K=k, BLOCK=BLOCK)
    return out


@kernel
def combine_pairs_kernel(
    pairs_ptr,  # [tokens, K, size]
    out_ptr,  # [tokens, size]
    size,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(K):
        total += tl.load(pairs_ptr + (token * K + choice) * size + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * size + column, total, mask=mask)
