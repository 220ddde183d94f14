"""Outputs that are scaled by a sigmoid, in place: of attention, number by number (Qiu et al. 2025, arXiv 2505.06708),
and of experts that every token uses, with one factor a token, which are also added to the routed experts' sum.

The sigmoid and the product are rounded to the outputs' type, as by torch's operators one after another. On a CPU the
sigmoid is computed with exp, for the reason given in `activate_and_mul_reference`.
"""

import torch
import triton
import triton.language as tl

from proa_engine.kernels.launch import INTERPRETED, begin, cdiv, kernel, next_power_of_2
from proa_engine.kernels.products.gpu_linear import GpuLinear, InvariantLinear
from proa_engine.kernels.products.linear import Linear

BLOCK = 1024  # numbers of a row that a program computes


def scale_by_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x, gate [T, N] -> x * sigmoid(gate), written over x, which is contiguous."""
    if x.is_cpu and not INTERPRETED:
        return x.div_(gate.neg().exp_().add_(1))
    (num_rows, size), block = x.shape, min(BLOCK, next_power_of_2(x.shape[1]))
    assert x.is_contiguous()
    assert gate.stride(1) == 1
    scale_by_sigmoid_kernel[(num_rows, cdiv(size, block))](x, gate, size, gate.stride(0), BLOCK=block, num_warps=4)
    return x


def add_gated(
    total: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, gate: Linear | GpuLinear | InvariantLinear
) -> None:
    """total [T, N] += x [T, N] * sigmoid(gate(rows)), of rows [T, K] and a gate with one output, [T, 1]. May overwrite
    x."""
    if isinstance(gate, Linear):
        total += x.div_(gate(rows).neg_().exp_().add_(1))
        return
    (num_rows, size), (_, num_inputs) = x.shape, gate.weight.shape
    block = min(BLOCK, next_power_of_2(size))
    assert total.is_contiguous()
    assert x.is_contiguous()
    assert gate.weight.is_contiguous()
    assert rows.stride(1) == 1
    add_gated_kernel[(num_rows, cdiv(size, block))](
        total,
        x,
        rows,
        gate.weight,
        size,
        num_inputs,
        rows.stride(0),
        BLOCK=block,
        BLOCK_K=next_power_of_2(num_inputs),
        num_warps=4,
    )


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@kernel
def scale_by_sigmoid_kernel(
    x_ptr,  # [rows, size]
    gate_ptr,  # [rows, size]
    size,
    stride_gate_row,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    x = tl.load(x_ptr + row * size + column, mask=mask, other=0.0)
    gate = tl.load(gate_ptr + row * stride_gate_row + column, mask=mask, other=0.0).to(tl.float32)
    factor = sigmoid(gate).to(x.dtype).to(tl.float32)
    tl.store(x_ptr + row * size + column, x.to(tl.float32) * factor, mask=mask)


@kernel
def add_gated_kernel(
    total_ptr,  # [rows, size]
    x_ptr,  # [rows, size]
    rows_ptr,  # [rows, num_inputs]
    weight_ptr,  # [num_inputs]
    size,
    num_inputs,
    stride_rows_row,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at least num_inputs
    PDL: tl.constexpr,
):
    """Each program computes its row's factor again: it reads as much for it as a few rows of x."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    weight = tl.load(weight_ptr + k, mask=k < num_inputs, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    inputs = tl.load(rows_ptr + row * stride_rows_row + k, mask=k < num_inputs, other=0.0).to(tl.float32)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    x = tl.load(x_ptr + row * size + column, mask=mask, other=0.0)
    gate = tl.sum(inputs * weight, axis=0).to(x.dtype).to(tl.float32)  # rounded as the product's output
    product = (x.to(tl.float32) * sigmoid(gate).to(x.dtype).to(tl.float32)).to(x.dtype).to(tl.float32)
    total = tl.load(total_ptr + row * size + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(total_ptr + row * size + column, total + product, mask=mask)
