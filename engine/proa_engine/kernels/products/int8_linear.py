"""Matrix products of 8-bit integers: y = x @ weight.T + bias, both quantized, summed exactly in 32 bits.

The weight has a scale for each output, x one for each row, and a zero if it is asymmetric. A zero is subtracted from
every number of its row, so its part of a product is the zero times the sum of the output's weights, which is known when
the weight is loaded. Sums of integers are exact in any order, so a row's bits do not depend on the other rows.

A program of the kernel computes a tile [BLOCK_M, BLOCK_N]. On a CPU, the reference computes the same sums in float32.
"""

import torch
import torch.nn.functional as F
import triton.language as tl

from proa_engine.kernels.fp8 import QuantizedRows
from proa_engine.kernels.int8 import Int8Form, quantize_int8
from proa_engine.kernels.launch import cdiv, kernel
from proa_engine.kernels.products.product_tile import ROWS_TOGETHER, rows_per_program, store_tile
from proa_engine.kernels.tilings import tilings_of

MAX_INPUTS = 1 << 16  # of which the sums, with their zeros, fit in 32 bits
EXACT_INPUTS = 1 << 10  # float32 has the integers up to 2^24: sums of so many products of up to 2^14


class Int8Linear:
    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, form: Int8Form) -> None:
        """weight [out_features, in_features] int8, scales [out_features] float32. Raises ValueError for too many
        inputs."""
        self.shape = weight.shape
        if weight.shape[1] > MAX_INPUTS:
            raise ValueError(
                f"a matrix of {list(weight.shape)} on each rank cannot be multiplied in 8-bit integers: they have "
                f"sums of up to {MAX_INPUTS} inputs"
            )
        self.form = form
        self.scales, self.bias = scales.contiguous(), bias
        self.sums = None if form.symmetric else weight.sum(1, dtype=torch.int32)
        self.weight = weight.float() if weight.is_cpu else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features]"""
        rows = quantize_int8(x, self.form)
        if x.is_cpu:
            return int8_matmul_reference(rows, self.weight, self.scales, self.sums, self.bias)
        return int8_matmul(rows, self.weight, self.scales, self.sums, self.bias)


def int8_matmul(
    x: QuantizedRows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    sums: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """x [rows, K], weight [N, K] int8, scales [N] float32 -> [rows, N] in x's type. GPU only.

    `sums` [N] int32: those of each output's weights, if x has zeros.
    """
    num_rows, num_inputs = x.values.shape
    num_outputs = weight.shape[0]
    assert x.values.is_contiguous()
    assert weight.is_contiguous()
    assert (x.zeros is None) == (sums is None)
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=weight.device)
    block_m = rows_per_program(num_rows)
    tile = tilings_of(weight.device).int8[block_m]
    grid = (cdiv(num_rows, block_m) * cdiv(num_outputs, tile.outputs),)
    int8_matmul_kernel[grid](
        x.values,
        x.scales,
        x.zeros,
        weight,
        scales,
        sums,
        bias,
        out,
        num_rows,
        num_outputs,
        num_inputs,
        HAS_ZEROS=sums is not None,
        HAS_BIAS=bias is not None,
        ROWS_TOGETHER=ROWS_TOGETHER,
        BLOCK_M=block_m,
        BLOCK_N=tile.outputs,
        BLOCK_K=128,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def int8_matmul_reference(
    x: QuantizedRows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    sums: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Compute `int8_matmul`; `weight` holds its integers as float32, which a CPU multiplies faster."""
    parts = zip(x.values.float().split(EXACT_INPUTS, 1), weight.split(EXACT_INPUTS, 1), strict=True)
    total = torch.zeros((x.shape[0], weight.shape[0]), dtype=torch.int32)
    for values, columns in parts:
        total += F.linear(values, columns).to(torch.int32)
    if sums is not None:
        assert x.zeros is not None
        total -= x.zeros * sums
    y = total.float() * x.scales * scales
    return (y if bias is None else y + bias.float()).to(x.dtype)


@kernel(do_not_specialize=["num_rows"])
def int8_matmul_kernel(
    x_ptr,  # [num_rows, num_inputs] int8
    x_scales_ptr,  # [num_rows]
    x_zeros_ptr,  # [num_rows], or nothing
    weight_ptr,  # [num_outputs, num_inputs] int8
    scales_ptr,  # [num_outputs]
    sums_ptr,  # [num_outputs], or nothing
    bias_ptr,  # [num_outputs], or nothing
    out_ptr,  # [num_rows, num_outputs]
    num_rows,
    num_outputs,
    num_inputs,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS_TOGETHER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tiles_n = tl.cdiv(num_outputs, BLOCK_N)
    program = tl.program_id(0)
    tile_m, tile_n = tl.swizzle2d(program // tiles_n, program % tiles_n, tiles_m, tiles_n, ROWS_TOGETHER)

    row = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row_mask = row < num_rows
    column_mask = column < num_outputs
    inner = tl.arange(0, BLOCK_K)
    x_place = x_ptr + row[:, None] * num_inputs + inner[None, :]
    weight_place = weight_ptr + column[None, :] * num_inputs + inner[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for start in range(0, num_inputs, BLOCK_K):
        inner_mask = start + inner < num_inputs
        x = tl.load(x_place + start, mask=row_mask[:, None] & inner_mask[None, :], other=0)
        weight = tl.load(weight_place + start, mask=column_mask[None, :] & inner_mask[:, None], other=0)
        total = tl.dot(x, weight, total, out_dtype=tl.int32)
    if HAS_ZEROS:
        zero = tl.load(x_zeros_ptr + row, mask=row_mask, other=0)
        total -= zero[:, None] * tl.load(sums_ptr + column, mask=column_mask, other=0)[None, :]
    x_scale = tl.load(x_scales_ptr + row, mask=row_mask, other=0.0)
    scale = tl.load(scales_ptr + column, mask=column_mask, other=0.0)
    y = total.to(tl.float32) * x_scale[:, None] * scale[None, :]
    store_tile(out_ptr, y, bias_ptr, row, column, num_rows, num_outputs, HAS_BIAS)
