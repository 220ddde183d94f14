"""Products by a matrix of 4-bit floats: y = x @ weight.T + bias, x in its own type.

On a GPU a Triton kernel dequantizes in registers (`fp4`). A program computes a tile [BLOCK_M, BLOCK_N] of the outputs,
or a part of it (`product_tile`). On a CPU, the reference: a float32 product by the dequantized weight.
"""

from dataclasses import dataclass

import torch
import triton.language as tl

from proa_engine.kernels.fp4 import BLOCK_K, Fp4Matrices, StoredFp4, fp4_tile, pack_fp4
from proa_engine.kernels.launch import INT32_END, begin, cdiv, kernel, num_multiprocessors
from proa_engine.kernels.products.linear import Linear
from proa_engine.kernels.products.product_tile import (
    ROWS_TOGETHER,
    add_parts,
    new_counters,
    rows_per_program,
    store_part,
    store_tile,
)
from proa_engine.kernels.tilings import ProductTile, Tilings, tilings_of

FEWEST_BLOCKS = 4  # of inputs that a program multiplies: as many as its pipeline has stages


@dataclass(frozen=True, slots=True)
class Tiling:
    block_m: int
    tile: ProductTile
    tiles: int
    part_blocks: int  # of inputs that a program multiplies
    num_parts: int  # of a tile


def choose_tiling(num_rows: int, num_outputs: int, num_inputs: int, multiprocessors: int, tilings: Tilings) -> Tiling:
    block_m = rows_per_program(num_rows)
    tile = tilings.fp4[block_m]
    tiles = cdiv(num_rows, block_m) * cdiv(num_outputs, tile.outputs)
    num_parts = max(tilings.fp4_programs[block_m] * multiprocessors // tiles, 1)
    num_blocks = cdiv(num_inputs, BLOCK_K)
    part_blocks = max(cdiv(num_blocks, num_parts), FEWEST_BLOCKS)
    return Tiling(block_m, tile, tiles, part_blocks, cdiv(num_blocks, part_blocks))


def fp4_matmul(x: torch.Tensor, weight: Fp4Matrices, arrived: torch.Tensor) -> torch.Tensor:
    """x [rows, inputs] times the only matrix of `weight` -> [rows, outputs] in x's type.

    `arrived`: of `new_counters`, zeros before and after, for one product at a time. GPU only.
    """
    (num_rows, num_inputs), num_outputs = x.shape, weight.num_outputs
    assert weight.words.shape[0] == 1
    assert weight.words.numel() < INT32_END
    assert weight.num_inputs == num_inputs
    assert x.stride(1) == 1
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    tiling = choose_tiling(num_rows, num_outputs, num_inputs, num_multiprocessors(x.device), tilings_of(x.device))
    parts = None
    if tiling.num_parts > 1:
        assert tiling.tiles <= arrived.numel()
        parts = torch.empty((tiling.num_parts, num_rows, num_outputs), dtype=torch.float32, device=x.device)
    fp4_matmul_kernel[tiling.tiles, tiling.num_parts](
        x,
        weight.words,
        weight.scales,
        weight.bias,
        out,
        parts,
        None if parts is None else arrived,
        num_rows,
        num_outputs,
        num_inputs,
        x.stride(0),
        tiling.part_blocks,
        IN_PARTS=parts is not None,
        HAS_BIAS=weight.bias is not None,
        ROWS_TOGETHER=ROWS_TOGETHER,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.tile.outputs,
        num_warps=tiling.tile.num_warps,
        num_stages=tiling.tile.num_stages,
    )
    return out


@kernel(do_not_specialize=["num_rows", "part_blocks"])
def fp4_matmul_kernel(
    x_ptr,  # [num_rows, num_inputs]
    words_ptr,  # [ceil(num_inputs / 128), num_outputs, 16]
    scales_ptr,  # as in `Fp4Matrices`
    bias_ptr,  # [num_outputs], or nothing
    out_ptr,  # [num_rows, num_outputs]
    parts_ptr,  # [num_parts, num_rows, num_outputs] float32, or nothing
    arrived_ptr,  # [tiles]: parts that are stored, or nothing
    num_rows,
    num_outputs,
    num_inputs,
    stride_x_row,
    part_blocks,  # of 128 inputs
    IN_PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS_TOGETHER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    tile = tl.program_id(0)
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tiles_n = tl.cdiv(num_outputs, BLOCK_N)
    tile_m, tile_n = tl.swizzle2d(tile // tiles_n, tile % tiles_n, tiles_m, tiles_n, ROWS_TOGETHER)
    row = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = row < num_rows
    column_mask = column < num_outputs
    part_inputs = part_blocks * 128
    first_input = tl.program_id(1) * part_inputs
    total = fp4_tile(
        x_ptr,
        words_ptr,
        scales_ptr,
        row,
        row_mask,
        stride_x_row,
        0,
        column,
        column_mask,
        num_outputs,
        num_inputs,
        first_input if IN_PARTS else 0,
        tl.minimum(first_input + part_inputs, num_inputs) if IN_PARTS else num_inputs,
        BLOCK_M,
        BLOCK_N,
    )
    if IN_PARTS:
        num_parts = tl.num_programs(1)
        size = num_rows.to(tl.int64) * num_outputs
        place = parts_ptr + row[:, None] * num_outputs + column[None, :]
        mask = row_mask[:, None] & column_mask[None, :]
        if not store_part(total, place + tl.program_id(1) * size, mask, arrived_ptr + tile, num_parts):
            return
        total = add_parts(place, mask, size, arrived_ptr + tile, num_parts, 1)
    store_tile(out_ptr, total, bias_ptr, row, column, num_rows, num_outputs, HAS_BIAS)


class Fp4Linear:
    def __init__(self, stored: StoredFp4, bias: torch.Tensor | None) -> None:
        """`stored`: one matrix [outputs, inputs]"""
        self.shape = torch.Size((stored.codes.shape[0], 2 * stored.codes.shape[1]))
        self.reference = None
        if stored.codes.is_cpu:
            self.reference = Linear(stored.dequantize(), None if bias is None else bias.float())
        else:
            self.weight = pack_fp4(stored.stacked(), None if bias is None else bias[None])
            self.arrived = new_counters(stored.codes.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., inputs] -> [..., outputs]"""
        if self.reference is not None:
            return self.reference(x.float()).to(x.dtype)
        return fp4_matmul(x, self.weight, self.arrived)
