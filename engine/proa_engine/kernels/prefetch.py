"""Reads of weights into the L2 cache before the kernel that multiplies by them.

They change no result. cp.async.bulk.prefetch needs compute capability 9.0, as dependent launch does: kernels prefetch
only if PDL is set.

PROA_L2_PREFETCH in the environment, MB of 2**20 bytes, is for trials on a GPU: so much of a layer's weights behind its
attention is read by programs of decode attention that have no item (`decode_attention`). 0, the default: nothing.
Whether it is faster has not been measured.
"""

import os
from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl

MOST_BYTES = int(float(os.environ.get("PROA_L2_PREFETCH", "0")) * (1 << 20))
CHUNK = 256  # bytes that a thread reads at a time
_CHUNK = tl.constexpr(CHUNK)  # for kernels


def parts_ahead(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """What to read beforehand of weights that are used in this order, at most MOST_BYTES in all: [parts, 2] int64, each
    part's address and its bytes, whole chunks. None without weights or PROA_L2_PREFETCH."""
    parts, left = [], MOST_BYTES
    for weight in weights if MOST_BYTES else ():
        assert weight.is_contiguous()
        assert weight.data_ptr() % 16 == 0
        num_bytes = min(weight.nbytes, left) // CHUNK * CHUNK
        left -= num_bytes
        if num_bytes:
            parts.append((weight.data_ptr(), num_bytes))
    return _table(tuple(parts), weights[0].device) if parts else None


@cache
def _table(parts: tuple[tuple[int, int], ...], device: torch.device) -> torch.Tensor:
    """Made once: a CUDA graph reads it, and none is captured before the same step ran without."""
    return torch.tensor(parts, dtype=torch.int64, device=device)


@triton.jit
def prefetch(place, size):
    """Read `size` numbers from each of `place` [N] into the L2 cache, in multiples of 16 bytes."""
    num_bytes = size * (place.dtype.element_ty.primitive_bitwidth // 8) // 16 * 16
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [place.to(tl.int64), num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_share(part_ptr, num_parts, share, num_shares, LANES: tl.constexpr):
    """Read this program's share, of `num_shares`, of each part of `parts_ahead`, one part after the other."""
    chunk = tl.arange(0, LANES)
    for part in range(num_parts):
        weight_ptr = tl.load(part_ptr + 2 * part).to(tl.pointer_type(tl.uint8))
        num_chunks = (tl.load(part_ptr + 2 * part + 1) // _CHUNK).to(tl.int32)
        for first in range(share * LANES, num_chunks, num_shares * LANES):
            # Lanes past the end read the last chunk again, without masks.
            prefetch(weight_ptr + tl.minimum(first + chunk, num_chunks - 1) * _CHUNK, _CHUNK)
