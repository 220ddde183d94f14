"""x @ weight.T of 8-bit floats, with a scale for each 128 inputs of a row and each 128 x 128 block of the weight.

A program computes a tile [BLOCK_M, BLOCK_N] of the output. Products of 128 inputs are summed, then scaled in float32,
in the same order for every number of rows.
"""

import torch
import triton.language as tl

from proa_engine.kernels.fp8 import QuantizedRows
from proa_engine.kernels.launch import kernel
from proa_engine.kernels.sizes import cdiv, next_power_of_2

BLOCK = 128  # inputs and outputs that share a scale
ROWS_TOGETHER = 8  # tiles of rows computed at the same time, so that they share the weight in the L2 cache


def fp8_block_matmul(
    x: QuantizedRows, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [rows, K], weight [N, K], scales [ceil(N / 128), K / 128] -> [rows, N] in x's type. GPU only.

    Its reference is the product of the dequantized tensors.
    """
    num_rows, num_inputs = x.values.shape
    num_outputs = weight.shape[0]
    assert num_inputs % BLOCK == 0
    assert weight.is_contiguous()
    assert scales.is_contiguous()
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=weight.device)
    block_m = min(max(next_power_of_2(num_rows), 16), 128)
    # With few rows the time is that of reading the weight, which is fastest with many programs.
    block_n = 32 if block_m <= 32 else 128
    grid = (cdiv(num_rows, block_m) * cdiv(num_outputs, block_n),)
    fp8_block_matmul_kernel[grid](
        x.values,
        x.scales,
        weight,
        scales,
        bias,
        out,
        num_rows,
        num_outputs,
        num_inputs,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=BLOCK,
        HAS_BIAS=bias is not None,
        ROWS_TOGETHER=ROWS_TOGETHER,
        num_warps=8 if block_m == 128 else 4,
        num_stages=3 if block_m == 128 else 4,
    )
    return out


@kernel(do_not_specialize=["num_rows"])
def fp8_block_matmul_kernel(
    x_ptr,  # [num_rows, num_inputs] float8
    x_scales_ptr,  # [num_rows, num_inputs / BLOCK_K]
    weight_ptr,  # [num_outputs, num_inputs] float8
    weight_scales_ptr,  # [ceil(num_outputs / BLOCK_K), num_inputs / BLOCK_K]
    bias_ptr,  # [num_outputs], or nothing
    out_ptr,  # [num_rows, num_outputs]
    num_rows,
    num_outputs,
    num_inputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides BLOCK_K, so that a tile has one scale of the weight
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS_TOGETHER: tl.constexpr,
):
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tiles_n = tl.cdiv(num_outputs, BLOCK_N)
    program = tl.program_id(0)
    first_m = program // (ROWS_TOGETHER * tiles_n) * ROWS_TOGETHER
    height = tl.minimum(tiles_m - first_m, ROWS_TOGETHER)
    tile_m = first_m + program % (ROWS_TOGETHER * tiles_n) % height
    tile_n = program % (ROWS_TOGETHER * tiles_n) // height

    row = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row_mask = row < num_rows
    column_mask = column < num_outputs
    inner = tl.arange(0, BLOCK_K)
    num_groups = num_inputs // BLOCK_K
    x_place = x_ptr + row[:, None] * num_inputs + inner[None, :]
    weight_place = weight_ptr + column[None, :] * num_inputs + inner[:, None]
    weight_scale_place = weight_scales_ptr + (tile_n * BLOCK_N // BLOCK_K) * num_groups
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in range(num_groups):
        x = tl.load(x_place + group * BLOCK_K, mask=row_mask[:, None], other=0.0)
        weight = tl.load(weight_place + group * BLOCK_K, mask=column_mask[None, :], other=0.0)
        x_scale = tl.load(x_scales_ptr + row * num_groups + group, mask=row_mask, other=0.0)
        scale = x_scale * tl.load(weight_scale_place + group)
        total += tl.dot(x, weight) * scale[:, None]
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + row[:, None] * num_outputs + column[None, :], total, mask=row_mask[:, None] & column_mask[None, :]
    )
