"""8-bit integers with scales, and the kernel that quantizes rows of numbers to them: x = (q - zero) * scale.

By compressed-tensors' formulas: the scale of symmetric rows is max|x| / 127.5, of asymmetric ones (max - min) / 255
where 0 counts as a number of the row; x / scale + zero is clamped to -128 … 127 and rounded to nearest, ties to even.
Scale and zero belong to a row, or, if they are known beforehand, to all rows. One program a row. Unlike quantization to
8-bit floats it is not fused into the kernels before it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from proa_engine.kernels.fp8 import SMALLEST, QuantizedRows, num_warps
from proa_engine.kernels.launch import INTERPRETED, begin, kernel, next_power_of_2

LOWEST, HIGHEST = -128, 127
NUM_STEPS = 255.0  # from the lowest number to the highest


@dataclass(frozen=True, slots=True, eq=False)
class Int8Form:
    """How a product needs its input quantized."""

    symmetric: bool = True
    scale: torch.Tensor | None = None  # [1] float32: the scale of all rows; None: computed from each row
    zero: torch.Tensor | None = None  # [1] int32: the zero of all rows, if asymmetric

    @property
    def is_static(self) -> bool:
        """Whether the scale is known before the rows."""
        return self.scale is not None


def quantize_int8(x: torch.Tensor, form: Int8Form) -> QuantizedRows:
    """x [T, N] -> the same, quantized; with zeros if asymmetric."""
    if x.is_cpu and not INTERPRETED:
        return quantize_int8_reference(x, form)
    rows, size = x.shape
    assert x.stride(1) == 1
    empty = x.new_empty
    out = QuantizedRows(
        empty((rows, size), dtype=torch.int8),
        empty((rows, 1), dtype=torch.float32),
        x.dtype,
        None if form.symmetric else empty((rows, 1), dtype=torch.int32),
    )
    block = next_power_of_2(size)
    quantize_int8_kernel[(rows,)](
        x,
        out.values,
        out.scales,
        out.zeros,
        form.scale,
        form.zero,
        size,
        x.stride(0),
        BLOCK=block,
        SYMMETRIC=form.symmetric,
        STATIC=form.is_static,
        num_warps=num_warps(block),
    )
    return out


def quantize_int8_reference(x: torch.Tensor, form: Int8Form) -> QuantizedRows:
    rows, values = x.shape[0], x.float()
    zeros = None
    if form.scale is not None:
        scales = form.scale.expand(rows, 1)
        zeros = None if form.zero is None else form.zero.expand(rows, 1)
    elif form.symmetric:
        scales = values.abs().amax(1, keepdim=True).clamp_(min=SMALLEST) / (NUM_STEPS / 2)
    else:
        least, most = values.amin(1, keepdim=True).clamp_(max=0), values.amax(1, keepdim=True).clamp_(min=0)
        scales = (most - least).clamp_(min=SMALLEST) / NUM_STEPS
        zeros = (LOWEST - least / scales).clamp_(LOWEST, HIGHEST).round_().to(torch.int32)
    quantized = values / scales
    if zeros is not None:
        quantized += zeros
    quantized = quantized.clamp_(LOWEST, HIGHEST).round_().to(torch.int8)
    return QuantizedRows(quantized, scales.contiguous(), x.dtype, None if zeros is None else zeros.contiguous())


@triton.jit
def round_to_int8(x):
    """x [...] float32 -> 8-bit integers, ties to even, clamped to their range."""
    x = tl.minimum(tl.maximum(x, -128.0), 127.0)
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2^23: float32's steps there are 1


@kernel
def quantize_int8_kernel(
    x_ptr,  # [rows, size]
    values_ptr,  # [rows, size]
    scales_ptr,  # [rows]
    zeros_ptr,  # [rows]; None if SYMMETRIC
    static_scale_ptr,  # [1]; None unless STATIC
    static_zero_ptr,  # [1]; None unless STATIC, or if SYMMETRIC
    size,
    stride_x_row,
    BLOCK: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    STATIC: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    x = tl.load(x_ptr + row * stride_x_row + columns, mask=mask, other=0.0).to(tl.float32)
    if STATIC:
        scale = tl.load(static_scale_ptr)
    elif SYMMETRIC:
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), axis=0), 1e-10), 127.5)
    else:
        least, most = tl.minimum(tl.min(x, axis=0), 0.0), tl.maximum(tl.max(x, axis=0), 0.0)
        scale = tl.div_rn(tl.maximum(most - least, 1e-10), 255.0)
    tl.store(scales_ptr + row, scale)
    # Divided, because a multiplication would be fused with the addition that rounds, and so round other numbers up.
    scaled = tl.div_rn(x, scale)
    if not SYMMETRIC:
        zero = tl.load(static_zero_ptr) if STATIC else round_to_int8(-128.0 - tl.div_rn(least, scale)).to(tl.int32)
        tl.store(zeros_ptr + row, zero)
        scaled += zero.to(tl.float32)
    tl.store(values_ptr + row * size + columns, round_to_int8(scaled), mask=mask)
