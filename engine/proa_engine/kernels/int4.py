"""Matrix products by 4-bit weights: y = x @ weight.T + bias with weight = (q - zero) * scale, by groups of inputs.

On a GPU a Triton kernel unpacks and scales the numbers tile by tile, in registers, before each dot product; a program
computes a tile [BLOCK_M, BLOCK_N], and (q - zero) * scale is rounded to x's type. On a CPU, the reference: a product by
the dequantized weight.
"""

from dataclasses import dataclass

import torch
import triton.language as tl

from proa_engine.kernels.gpu_linear import store_tile
from proa_engine.kernels.launch import cdiv, kernel, next_power_of_2
from proa_engine.kernels.linear import Linear

PACKED = 8  # numbers in an int32


@dataclass(frozen=True, eq=False)  # without slots, as `ExpertMatrices`
class Int4Weight:
    """A weight [outputs, inputs] of 4-bit numbers. AWQ and GPTQ checkpoints are repacked to this layout."""

    packed: torch.Tensor  # [inputs / 8, outputs] int32: eight neighbouring inputs, the first in the lowest bits
    scales: torch.Tensor  # [groups, outputs]
    zeros: torch.Tensor  # [groups, outputs] int8: 0 … 16
    groups: torch.Tensor | None  # [inputs] int32: the group of each input; None: equal runs of inputs


def int4_matmul(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """x [rows, inputs] -> [rows, outputs] in x's type. GPU only."""
    num_rows, num_inputs = x.shape
    num_outputs = weight.packed.shape[1]
    assert x.stride(1) == 1
    assert weight.packed.is_contiguous()
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    group_size = num_inputs // weight.scales.shape[0]
    block_m = min(max(next_power_of_2(num_rows), 16), 64)
    block_n = 64 if block_m <= 32 else 128
    grid = (cdiv(num_rows, block_m), cdiv(num_outputs, block_n))
    int4_matmul_kernel[grid](
        x,
        weight.packed,
        weight.scales,
        weight.zeros,
        weight.groups,
        bias,
        out,
        num_rows,
        num_outputs,
        num_inputs,
        group_size,
        x.stride(0),
        HAS_GROUPS=weight.groups is not None,
        HAS_BIAS=bias is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=32,  # the smallest group
        num_warps=4,
        num_stages=4,
    )
    return out


@kernel(do_not_specialize=["num_rows"])
def int4_matmul_kernel(
    x_ptr,  # [num_rows, num_inputs]
    packed_ptr,  # [num_inputs / 8, num_outputs]
    scales_ptr,  # [groups, num_outputs]
    zeros_ptr,  # [groups, num_outputs]
    groups_ptr,  # [num_inputs], or nothing
    bias_ptr,  # [num_outputs], or nothing
    out_ptr,  # [num_rows, num_outputs]
    num_rows,
    num_outputs,
    num_inputs,
    group_size,
    stride_x_row,
    HAS_GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides the group's size, unless HAS_GROUPS
):
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row_mask = row < num_rows
    column_mask = column < num_outputs
    inner = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, num_inputs, BLOCK_K):
        index = start + inner
        index_mask = index < num_inputs
        mask = index_mask[:, None] & column_mask[None, :]
        x = tl.load(
            x_ptr + row[:, None] * stride_x_row + index[None, :],
            mask=row_mask[:, None] & index_mask[None, :],
            other=0.0,
        )
        # [BLOCK_K, BLOCK_N]
        packed = tl.load(packed_ptr + (index // 8)[:, None] * num_outputs + column[None, :], mask=mask, other=0)
        q = (packed >> ((index % 8) * 4)[:, None]) & 15
        if HAS_GROUPS:
            group = tl.load(groups_ptr + index, mask=index_mask, other=0).to(tl.int64)
            place = group[:, None] * num_outputs + column[None, :]
            scale = tl.load(scales_ptr + place, mask=mask, other=0.0)
            zero = tl.load(zeros_ptr + place, mask=mask, other=0)
        else:
            place = start // group_size * num_outputs + column
            scale = tl.load(scales_ptr + place, mask=column_mask, other=0.0)[None, :]
            zero = tl.load(zeros_ptr + place, mask=column_mask, other=0)[None, :]
        weight = (q - zero.to(tl.int32)).to(tl.float32) * scale.to(tl.float32)
        total = tl.dot(x, weight.to(x.dtype), total, input_precision="ieee")
    store_tile(out_ptr, total, bias_ptr, None, row, column, num_rows, num_outputs, HAS_BIAS, False)


class Int4Linear:
    def __init__(self, weight: Int4Weight, bias: torch.Tensor | None) -> None:
        self.shape = torch.Size((weight.packed.shape[1], weight.packed.shape[0] * PACKED))
        self.reference = None
        if weight.packed.is_cpu:
            self.reference = Linear(dequantize_int4(weight), bias)
        else:
            self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, inputs] -> [rows, outputs]"""
        if self.reference is not None:
            return self.reference(x)
        return int4_matmul(x, self.weight, self.bias)


def dequantize_int4(weight: Int4Weight) -> torch.Tensor:
    """Return the weight [outputs, inputs] in the type of its scales."""
    shifts = torch.arange(0, 4 * PACKED, 4, dtype=torch.int32, device=weight.packed.device)
    q = ((weight.packed[:, None, :] >> shifts[None, :, None]) & 15).flatten(0, 1)
    num_inputs, num_groups = q.shape[0], weight.scales.shape[0]
    groups = weight.groups
    if groups is None:
        groups = torch.arange(num_inputs, device=q.device) // (num_inputs // num_groups)
    groups = groups.long()
    return ((q - weight.zeros[groups]).to(weight.scales.dtype) * weight.scales[groups]).t().contiguous()
