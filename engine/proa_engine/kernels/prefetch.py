"""Reads of weights into the L2 cache before the kernel that multiplies by them.

They change no result. cp.async.bulk.prefetch needs compute capability 9.0, as dependent launch does: kernels prefetch
only if PDL is set.

PROA_L2_PREFETCH in the environment, MB of 2**20 bytes, is for trials on a GPU: so much of the attention's output weight
is read by programs of decode attention that have no item (`decode_attention`). 0, the default: nothing. Whether it is
faster has not been measured.
"""

import os

import torch
import triton
import triton.language as tl

MOST_BYTES = int(float(os.environ.get("PROA_L2_PREFETCH", "0")) * (1 << 20))
CHUNK = 256  # bytes that a thread reads at a time
_CHUNK = tl.constexpr(CHUNK)  # for kernels


def num_prefetched(weight: torch.Tensor | None) -> int:
    """The bytes of `weight` to read beforehand: whole chunks, 0 without a weight or PROA_L2_PREFETCH."""
    if not MOST_BYTES or not isinstance(weight, torch.Tensor):
        return 0
    assert weight.is_contiguous()
    assert weight.data_ptr() % 16 == 0
    return min(weight.nbytes, MOST_BYTES) // CHUNK * CHUNK


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
def prefetch_share(weight_ptr, num_bytes, share, num_shares, LANES: tl.constexpr):
    """Read this program's share, of `num_shares`, of the first `num_bytes` of a weight, a multiple of CHUNK."""
    chunk = tl.arange(0, LANES)
    num_chunks = num_bytes // _CHUNK
    for first in range(share * LANES, num_chunks, num_shares * LANES):
        # Lanes past the end read the last chunk again, without masks.
        offset = tl.minimum(first + chunk, num_chunks - 1) * _CHUNK
        prefetch(weight_ptr.to(tl.pointer_type(tl.uint8)) + offset, _CHUNK)
