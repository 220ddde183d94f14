"""Tiles of the outputs of a matrix product: what the kernels share, of which each computes a tile a program.

Where the tiles are too few to keep every multiprocessor reading, several programs share a tile: each multiplies a part
of the inputs, and the last one to end adds the parts (`arrive`) and clears the tile's counter.
"""

import torch
import triton
import triton.language as tl

from proa_engine.kernels.arrive import arrive
from proa_engine.kernels.launch import next_power_of_2, num_multiprocessors

ROWS_TOGETHER = 8  # tiles of rows computed at the same time, so that they share the weight in the L2 cache
MOST_SHARED_TILES = 2  # of a multiprocessor


def rows_per_program(num_rows: int) -> int:
    """The rows of a tile: at least the 16 of tl.dot, at most the 128 that registers hold."""
    return min(max(next_power_of_2(num_rows), 16), 128)


@triton.jit
def store_tile(
    out_ptr,  # [num_rows, num_outputs]
    total,  # [M, N] float32: the products of `row` and `column`
    bias_ptr,  # [num_outputs], or nothing
    row,  # [M]
    column,  # [N]
    num_rows,
    num_outputs,
    HAS_BIAS: tl.constexpr,
):
    """The end of a product's program: store total + bias."""
    row_mask = row < num_rows
    column_mask = column < num_outputs
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + row[:, None] * num_outputs + column[None, :], total, mask=row_mask[:, None] & column_mask[None, :]
    )


def new_counters(device: torch.device) -> torch.Tensor:
    """Zeros for the programs of any product that shares tiles."""
    return torch.zeros(MOST_SHARED_TILES * num_multiprocessors(device), dtype=torch.int32, device=device)


@triton.jit
def store_part(
    total,  # [M, N] float32
    place,  # [M, N]: addresses of this part
    mask,  # [M, N], or nothing
    arrived_ptr,  # [1]: parts of the tile that are stored
    num_parts,
):
    """Store a part of a tile. Returns whether it is the last one to be stored, whose program adds them."""
    tl.store(place, total, mask=mask)
    return arrive(arrived_ptr, 1, num_parts)


@triton.jit
def add_parts(
    place,  # [M, N]: addresses of the first part
    mask,  # [M, N], or nothing
    size,  # from a part to the next
    arrived_ptr,  # [1], cleared
    num_parts,
    UNROLL: tl.constexpr,  # parts that are loaded at a time
):
    """Return the sum of a tile's parts, [M, N] float32, undefined outside the mask."""
    tl.store(arrived_ptr, 0)
    total = tl.zeros(place.shape, tl.float32)
    for part in tl.range(0, num_parts, num_stages=1, loop_unroll_factor=UNROLL):
        total += tl.load(place + part * size, mask=mask, cache_modifier=".cg")
    return total
