"""RMSNorm, alone or of a residual sum, whose result goes on in 8-bit floats: what `rms_norm` gives, quantized.

One program a row; the whole row in one tile.
"""

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
from proa_engine.kernels.rms_norm import add_rms_norm_reference, rms_norm_reference


def rms_norm_fp8(x: torch.Tensor, weight: torch.Tensor, eps: float, form: Fp8Form) -> QuantizedRows:
    """x [T, N], weight [N]"""
    if x.is_cpu:
        return quantize_reference(rms_norm_reference(x, weight, eps), form)
    return _rms_norm_fp8_triton(x, None, weight, eps, form)


def add_rms_norm_fp8(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, form: Fp8Form
) -> tuple[QuantizedRows, torch.Tensor]:
    """x, residual [T, N] -> (norm(x + residual), x + residual); may overwrite both inputs."""
    if x.is_cpu:
        normed, residual = add_rms_norm_reference(x, residual, weight, eps)
        return quantize_reference(normed, form), residual
    return _rms_norm_fp8_triton(x, residual, weight, eps, form), residual


def _rms_norm_fp8_triton(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, form: Fp8Form
) -> QuantizedRows:
    rows, size = x.shape
    assert x.stride(1) == 1
    assert residual is None or residual.is_contiguous()
    out = empty_rows(rows, size, form, x)
    block = triton.next_power_of_2(size)
    rms_norm_fp8_kernel[(rows,)](
        x,
        residual,
        weight,
        out.values,
        out.scales,
        form.scale,
        size,
        x.stride(0),
        eps,
        BLOCK=block,
        GROUP=form.group or 0,
        STATIC=form.scale is not None,
        HAS_RESIDUAL=residual is not None,
        ROUND=ROUND_BEFORE,
        num_warps=num_warps(block),
        **dependent_launch(),
    )
    return out


@triton.jit
def rms_norm_fp8_kernel(
    x_ptr,  # [rows, size]
    residual_ptr,  # [rows, size], read, then overwritten by x + residual; or nothing
    weight_ptr,  # [size]
    values_ptr,  # [rows, size]
    scales_ptr,  # [rows, size / GROUP]
    static_ptr,  # [1], or nothing
    size,
    stride_x_row,
    eps,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    STATIC: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
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
    x = tl.load(x_ptr + row * stride_x_row + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * size + columns, mask=mask, other=0.0).to(tl.float32)
        # The sum goes on in the residual's type, and so does the norm.
        x = x.to(residual_ptr.dtype.element_ty).to(tl.float32)
        tl.store(residual_ptr + row * size + columns, x, mask=mask)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / size + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    # Rounded as where the norm's result is written out.
    normed = (x * scale * weight).to(x_ptr.dtype.element_ty).to(tl.float32)
    num_groups = 1 if GROUP == 0 else size // GROUP
    store_quantized(
        normed,
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
