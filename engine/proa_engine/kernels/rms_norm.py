"""RMSNorm (Zhang and Sennrich 2019): y = weight * x / sqrt(mean(x²) + eps) over the last dimension, in float32.

Optionally of x + residual, and optionally quantized to 8-bit floats. One program computes one row, held in one tile.
`gated_rms_norm` is that of each head, times silu(gate). One program computes one head of one token.
"""

import torch
import triton.language as tl

from proa_engine.kernels.fp8 import (
    Fp8Form,
    QuantizedRows,
    RowsOut,
    empty_rows,
    num_warps,
    plain_out,
    quantize_reference,
    quantized_out,
    store_quantized,
)
from proa_engine.kernels.launch import INTERPRETED, begin, kernel, next_power_of_2


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., N], weight [N] -> [..., N] in x's type."""
    if x.is_cpu and not INTERPRETED:
        return rms_norm_reference(x, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, x.shape[-1]) if x.dim() == 2 or x.is_contiguous() else x.contiguous().view(-1, x.shape[-1])
    _launch(rows, None, weight, plain_out(out), eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, N], weight [N] -> (norm(x + residual), x + residual), [T, N] each; may overwrite both inputs."""
    if x.is_cpu and not INTERPRETED:
        return add_rms_norm_reference(x, residual, weight, eps)
    assert x.is_contiguous()
    _launch(x, residual, weight, plain_out(x), eps)
    return x, residual


def rms_norm_fp8(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, form: Fp8Form
) -> tuple[QuantizedRows, torch.Tensor]:
    """x, residual [T, N], weight [N] -> the results of `add_rms_norm`, [T, N] each, the first quantized.

    Without a residual the second is x, which is kept; with one, both inputs may be overwritten.
    """
    if x.is_cpu and not INTERPRETED:
        total = x if residual is None else x.add_(residual)
        return quantize_reference(rms_norm_reference(total, weight, eps), form), total
    out = empty_rows(x.shape[0], x.shape[1], form, x)
    _launch(x, residual, weight, quantized_out(out, form), eps)
    return out, x if residual is None else residual


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., N], weight [N] -> [..., N]. A row's bits do not depend on the other rows.

    Computed from the vector norm, in half the time that the eight operations of `F.rms_norm` take on a CPU.
    """
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    scale = torch.addcmul(norm.new_full((), eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return values.mul(scale).mul_(weight).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    residual = x.add_(residual)
    return rms_norm_reference(residual, weight, eps), residual


def _launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, out: RowsOut, eps: float) -> None:
    """x, residual [T, N], weight [N]"""
    num_rows, size = x.shape
    assert x.stride(-1) == 1
    assert residual is None or residual.is_contiguous()
    block = next_power_of_2(size)
    rms_norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        out.values,
        out.scales,
        out.static,
        size,
        x.stride(0),
        eps,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        **out.constants,
        num_warps=num_warps(block) if out.is_quantized else min(max(block // 256, 1), 16),
    )


@kernel
def rms_norm_kernel(
    x_ptr,  # [num_rows, size]
    residual_ptr,  # [num_rows, size], read, then overwritten by x + residual; None without a residual
    weight_ptr,  # [size]
    out_ptr,  # [num_rows, size]; may be x_ptr
    scales_ptr,  # [num_rows, size / GROUP]; None unless QUANTIZE
    static_ptr,  # [1]; None unless STATIC
    size,
    stride_x_row,
    eps,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    QUANTIZE: tl.constexpr,
    GROUP: tl.constexpr,  # 0: one scale for the whole row
    STATIC: tl.constexpr,
    ROUND: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    # [BLOCK]
    x = tl.load(x_ptr + row * stride_x_row + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * size + columns, mask=mask, other=0.0).to(tl.float32)
        # Rounded to the residual's type before the norm, as in the reference.
        x = x.to(residual_ptr.dtype.element_ty).to(tl.float32)
        tl.store(residual_ptr + row * size + columns, x, mask=mask)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / size + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    normed = x * scale * weight
    if QUANTIZE:
        # Rounded to x's type before it is quantized, as in the reference.
        normed = normed.to(x_ptr.dtype.element_ty).to(tl.float32)
        store_quantized(normed, row, out_ptr, scales_ptr, static_ptr, size, BLOCK, GROUP, STATIC, ROUND)
    else:
        tl.store(out_ptr + row * size + columns, normed, mask=mask)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x, gate [T, heads * N], weight [N] -> [T, heads * N] in x's type"""
    if x.is_cpu and not INTERPRETED:
        return gated_rms_norm_reference(x, gate, weight, eps)
    num_tokens, width = x.shape
    size = weight.shape[0]
    assert x.is_contiguous()
    assert gate.stride(1) == 1
    out = torch.empty_like(x)
    block = next_power_of_2(size)
    gated_rms_norm_kernel[(num_tokens, width // size)](
        x,
        gate,
        weight,
        out,
        gate.stride(0),
        eps,
        NUM_HEADS=width // size,
        SIZE=size,
        BLOCK=block,
        num_warps=1,
    )
    return out


def gated_rms_norm_reference(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute `gated_rms_norm` in torch, with exp for the gate as in `activate_and_mul_reference`."""
    normed = rms_norm_reference(x.float().view(len(x), -1, weight.shape[0]), weight.float(), eps).view_as(x)
    z = gate.float()
    return normed.mul_(torch.div(z, z.neg().exp_().add_(1))).to(x.dtype)


@kernel
def gated_rms_norm_kernel(
    x_ptr,  # [num_tokens, NUM_HEADS, SIZE]
    gate_ptr,  # [num_tokens, NUM_HEADS * SIZE]
    weight_ptr,  # [SIZE]
    out_ptr,  # [num_tokens, NUM_HEADS, SIZE]
    stride_gate_token,
    eps,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    index = tl.arange(0, BLOCK)
    mask = index < SIZE
    place = (token * NUM_HEADS + head) * SIZE + index
    # [BLOCK]
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * stride_gate_token + head * SIZE + index, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + index, mask=mask, other=0.0).to(tl.float32)
    normed = x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) / SIZE + eps)) * weight
    tl.store(out_ptr + place, normed * gate / (1.0 + tl.exp(-gate)), mask=mask)
