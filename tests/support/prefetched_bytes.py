"""Which bytes programs without work would read of weights (`kernels/prefetch.py`)."""

from collections.abc import Sequence
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
def share_kernel(part_ptr, num_parts, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    prefetch.prefetch_share(part_ptr, num_parts, tl.program_id(0), tl.num_programs(0), LANES)


def mark_bytes(weights: Sequence[Tensor], num_programs: int, most_bytes: int) -> None:
    """Make ones of the zeros that a program reads of weights [N] uint8; in the interpreter."""
    with mock.patch.object(prefetch, "prefetch", mark), mock.patch.object(prefetch, "MOST_BYTES", most_bytes):
        parts = prefetch.parts_ahead(weights)
        assert parts is not None
        share_kernel[(num_programs,)](parts, parts.shape[0], LANES=4)
