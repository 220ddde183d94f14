"""SiLU of one half times the other, going on in 8-bit floats: what `silu_and_mul` gives, quantized. A program a row."""

import torch
import triton
import triton.language as tl

from proa_engine.kernels.dependent_launch import dependent_launch
from proa_engine.kernels.fp8 import (
    ROUND_BEFORE,
    Fp8Form,
    QuantizedRows,
    empty_rows,
    num_warps,
    quantize_reference,
    store_quantized,
)
from proa_engine.kernels.silu_and_mul import silu_and_mul_reference


def silu_and_mul_fp8(x: torch.Tensor, form: Fp8Form) -> QuantizedRows:
    """x [T, 2N] -> [T, N]"""
    return quantize_reference(silu_and_mul_reference(x), form) if x.is_cpu else _silu_and_mul_fp8_triton(x, form)


def _silu_and_mul_fp8_triton(x: torch.Tensor, form: Fp8Form) -> QuantizedRows:
    rows, size = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1
    out = empty_rows(rows, size, form, x)
    block = triton.next_power_of_2(size)
    silu_and_mul_fp8_kernel[(rows,)](
        x,
        out.values,
        out.scales,
        form.scale,
        size,
        x.stride(0),
        BLOCK=block,
        GROUP=form.group or 0,
        STATIC=form.scale is not None,
        ROUND=ROUND_BEFORE,
        num_warps=num_warps(block),
        **dependent_launch(),
    )
    return out


@triton.jit
def silu_and_mul_fp8_kernel(
    x_ptr,  # [rows, 2 * size]
    values_ptr,  # [rows, size]
    scales_ptr,  # [rows, size / GROUP]
    static_ptr,  # [1], or nothing
    size,
    stride_x_row,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    STATIC: tl.constexpr,
    ROUND: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    # [BLOCK]
    gate = tl.load(x_ptr + row * stride_x_row + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x_row + size + columns, mask=mask, other=0.0).to(tl.float32)
    # Rounded as where the product is written out.
    y = (gate / (1.0 + tl.exp(-gate)) * up).to(x_ptr.dtype.element_ty).to(tl.float32)
    num_groups = 1 if GROUP == 0 else size // GROUP
    store_quantized(
        y,
        columns,
        mask,
        values_ptr + row * size,
        scales_ptr + row * num_groups,
        static_ptr,
        size,
        BLOCK,
        GROUP,
        STATIC,
        ROUND,
    )
