"""8-bit floats (e4m3) with scales, and the kernel that quantizes rows of numbers to them.

One scale belongs to a row, to a group of inputs of a row, or, if it is known beforehand, to all rows. Values are
multiplied by 448 / max|x| and rounded to nearest, ties to even; the scale max|x| / 448 restores them. One program a
row.
"""

import os
from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from proa_engine.kernels.launch import INTERPRETED, begin, capability, kernel, next_power_of_2

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
BLOCK = 128  # inputs and outputs that share a scale, in weights of blocks
FP8_CAPABILITY = 89
SMALLEST = 1e-10  # the least max|x|, so that a row of zeros has a scale
# Triton's interpreter loses a carry when it rounds to 8 bits, so there the kernels round beforehand.
ROUND_BEFORE = os.environ.get("TRITON_INTERPRET") == "1"


def check_device(device: torch.device) -> None:
    """Raise `ValueError` if the device is a GPU without 8-bit floats."""
    if device.type == "cuda" and (found := capability(device)) < FP8_CAPABILITY:
        raise ValueError(
            "8-bit floats (quantization, kv_cache_dtype) need a GPU of compute capability 8.9 or later, such as an L4 "
            f"or an H100; this one has {found // 10}.{found % 10}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Form:
    """How a product needs its input quantized."""

    group: int | None = None  # inputs that share a scale; None: the whole row
    scale: torch.Tensor | None = None  # [1] float32: the scale of all rows; None: computed from each row or group

    @property
    def is_static(self) -> bool:
        """Whether the scale is known before the rows."""
        return self.scale is not None

    def for_rows(self, num_rows: int) -> Self:
        return self


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedRows:
    """x [T, N] of type `dtype`, quantized."""

    values: torch.Tensor  # [T, N] float8_e4m3fn, or int8
    scales: torch.Tensor  # [T, groups] float32
    dtype: torch.dtype
    zeros: torch.Tensor | None = None  # [T, 1] int32: the integers that stand for 0; None: 0

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


def quantize(x: torch.Tensor | QuantizedRows, form: Fp8Form) -> QuantizedRows:
    """x [T, N] -> the same, quantized. Quantized rows are returned unchanged."""
    if isinstance(x, QuantizedRows):
        return x
    if x.is_cpu and not INTERPRETED:
        return quantize_reference(x, form)
    rows, size = x.shape
    assert x.stride(1) == 1
    out = empty_rows(rows, size, form, x)
    block = next_power_of_2(size)
    quantize_kernel[(rows,)](
        x,
        out.values,
        out.scales,
        form.scale,
        size,
        x.stride(0),
        BLOCK=block,
        GROUP=form.group or 0,
        STATIC=form.is_static,
        ROUND=ROUND_BEFORE,
        num_warps=num_warps(block),
    )
    return out


def with_scale(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x [...] -> x / scale as 8-bit floats, clamped to their range."""
    return (x.float() * (1.0 / scale)).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def quantize_reference(x: torch.Tensor, form: Fp8Form) -> QuantizedRows:
    rows, size = x.shape
    groups = x.float().view(rows, -1, form.group or size)
    if form.scale is None:
        most = groups.abs().amax(dim=-1, keepdim=True).clamp_(min=SMALLEST)
        # 448 / most of a Python number would be PyTorch's 448 * (1 / most), which is rounded twice.
        factor, scales = most.new_full((), FP8_MAX) / most, most / FP8_MAX
    else:
        factor, scales = 1.0 / form.scale, form.scale.expand(rows, groups.shape[1])
    values = (groups * factor).clamp_(-FP8_MAX, FP8_MAX).to(FP8).view(rows, size)
    return QuantizedRows(values, scales.reshape(rows, -1).contiguous(), x.dtype)


def dequantize_rows(x: QuantizedRows) -> torch.Tensor:
    """Quantized rows [T, N] -> float32 [T, N]"""
    rows, size = x.values.shape
    groups = x.values.float().view(rows, x.scales.shape[1], -1)
    return (groups * x.scales[:, :, None]).view(rows, size)


def dequantize_blocks(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """A weight [out_features, in_features] with block scales -> float32 [out_features, in_features]"""
    by_output = scales.repeat_interleave(BLOCK, 0)[: weight.shape[0]]
    return weight.float() * by_output.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]


def quantize_blocks_reference(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [out_features, in_features] -> the same as 8-bit floats, and the scales of its blocks [ceil(out_features
    / 128), in_features / 128] float32."""
    num_outputs, num_inputs = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, 0, 0, -num_outputs % BLOCK))
    blocks = padded.view(-1, BLOCK, num_inputs // BLOCK, BLOCK)
    most = blocks.abs().amax((1, 3), keepdim=True).clamp_(min=SMALLEST)
    values = (blocks * (FP8_MAX / most)).clamp_(-FP8_MAX, FP8_MAX).to(FP8).view(-1, num_inputs)
    return values[:num_outputs], (most / FP8_MAX)[:, 0, :, 0].contiguous()


def empty_rows(rows: int, size: int, form: Fp8Form, like: torch.Tensor) -> QuantizedRows:
    """Allocate quantized rows [rows, size] on the device of `like`, uninitialised."""
    num_groups = size // (form.group or size)
    values = torch.empty((rows, size), dtype=FP8, device=like.device)
    scales = torch.empty((rows, num_groups), dtype=torch.float32, device=like.device)
    return QuantizedRows(values, scales, like.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class RowsOut:
    """Where a kernel stores rows [T, N], and how: the arguments of kernels that can store them by `store_quantized`."""

    values: torch.Tensor  # [T, N]
    is_quantized: bool
    scales: torch.Tensor | None  # [T, groups] float32, if quantized
    static: torch.Tensor | None  # [1] float32: the scale of all rows, if quantized by a known one
    group: int  # inputs that share a scale; 0: the whole row

    @property
    def constants(self) -> dict[str, object]:
        is_static = self.static is not None
        return {"QUANTIZE": self.is_quantized, "GROUP": self.group, "STATIC": is_static, "ROUND": ROUND_BEFORE}


def plain_out(values: torch.Tensor) -> RowsOut:
    """Rows are stored in the type of `values` [T, N]."""
    return RowsOut(values, False, None, None, 0)


def quantized_out(rows: QuantizedRows, form: Fp8Form) -> RowsOut:
    """Rows are quantized to `form` and stored in `rows`."""
    return RowsOut(rows.values, True, rows.scales, form.scale, form.group or 0)


def num_warps(block: int) -> int:
    """Warps of a program that holds a row of `block` numbers."""
    return min(max(block // 512, 1), 16)


@triton.jit
def round_to_fp8(x):
    """x [...] float32 -> nearest e4m3 value, ties to even: 3 mantissa bits, steps of 2^-9 below 2^-6."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
    normal = bits.to(tl.float32, bitcast=True)
    tiny = (x + 24576.0) - 24576.0  # 1.5 * 2^14: float32's steps there are 2^-9
    return tl.where(tl.abs(x) < 0.015625, tiny, normal)


@triton.jit
def to_fp8(x, ROUND: tl.constexpr):
    """x [...] float32 -> 8-bit floats, clamped to their range."""
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    if ROUND:
        x = round_to_fp8(x)
    return x.to(tl.float8e4nv)


@triton.jit
def store_quantized(
    x,  # [BLOCK] float32, zero behind `size`
    row,  # int64
    values_ptr,  # [rows, size]
    scales_ptr,  # [rows, size / GROUP]
    static_ptr,  # [1], or nothing
    size,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,  # 0: the whole row
    STATIC: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Quantize a row [BLOCK] and store its values and scales."""
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    values_ptr += row * size
    scales_ptr += row * (1 if GROUP == 0 else size // GROUP)
    if GROUP > 0:
        grouped = tl.reshape(x, (BLOCK // GROUP, GROUP))
        most = tl.maximum(tl.max(tl.abs(grouped), axis=1), 1e-10)
        group = tl.arange(0, BLOCK // GROUP)
        tl.store(scales_ptr + group, tl.div_rn(most, 448.0), mask=group * GROUP < size)
        scaled = tl.reshape(grouped * tl.div_rn(448.0, most)[:, None], (BLOCK,))
    elif STATIC:
        scale = tl.load(static_ptr)
        tl.store(scales_ptr, scale)
        scaled = x * tl.div_rn(1.0, scale)
    else:
        most = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-10)
        tl.store(scales_ptr, tl.div_rn(most, 448.0))
        scaled = x * tl.div_rn(448.0, most)
    tl.store(values_ptr + columns, to_fp8(scaled, ROUND), mask=mask)


@kernel
def quantize_kernel(
    x_ptr,  # [rows, size]
    values_ptr,  # [rows, size]
    scales_ptr,  # [rows, size / GROUP]
    static_ptr,
    size,
    stride_x_row,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    STATIC: tl.constexpr,
    ROUND: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    x = tl.load(x_ptr + row * stride_x_row + columns, mask=mask, other=0.0).to(tl.float32)
    store_quantized(x, row, values_ptr, scales_ptr, static_ptr, size, BLOCK, GROUP, STATIC, ROUND)
