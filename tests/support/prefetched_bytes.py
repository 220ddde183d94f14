"""Which bytes programs without work would read of a weight (`kernels/prefetch.py`)."""

from unittest import mock

import triton
import triton.language as tl
from torch import Tensor

from proa_engine.kernels import prefetch
from proa_engine.kernels.launch import kernel


@triton.jit
def mark(place, size):  # type: ignore[no-untyped-def]  # Triton's language
    """In place of `prefetch`, whose instruction the interpreter lacks."""
    byte = tl.arange(0, 256)
    tl.store(place[:, None] + byte[None, :], tl.full([place.shape[0], 256], 1, tl.uint8), mask=byte[None, :] < size)


@kernel
def share_kernel(weight_ptr, num_bytes, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    prefetch.prefetch_share(weight_ptr, num_bytes, tl.program_id(0), tl.num_programs(0), LANES)


def marked_bytes(weight: Tensor, num_programs: int, most_bytes: int) -> Tensor:
    """weight [N] uint8 of zeros -> ones where a program reads; in the interpreter."""
    with mock.patch.object(prefetch, "prefetch", mark), mock.patch.object(prefetch, "MOST_BYTES", most_bytes):
        share_kernel[(num_programs,)](weight, prefetch.num_prefetched(weight), LANES=4)
    return weight
