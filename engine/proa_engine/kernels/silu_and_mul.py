"""SiLU of one half times the other: y = gate * sigmoid(gate) * up, for x = [gate | up]. One program a row and block."""

import torch
import triton
import triton.language as tl

from proa_engine.kernels.dependent_launch import dependent_launch

BLOCK = 1024


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2N] -> [T, N]"""
    return silu_and_mul_reference(x) if x.is_cpu else _silu_and_mul_triton(x)


def silu_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """By exp rather than `F.silu`, whose bits on a CPU depend on where a thread's share of the batch begins."""
    gate, up = x.chunk(2, dim=-1)
    return torch.div(gate, gate.neg().exp_().add_(1)).mul_(up)


def _silu_and_mul_triton(x: torch.Tensor) -> torch.Tensor:
    assert x.stride(-1) == 1
    num_rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    grid = (num_rows, triton.cdiv(size, BLOCK))
    silu_and_mul_kernel[grid](x, out, size, x.stride(0), BLOCK=BLOCK, **dependent_launch())
    return out


@triton.jit
def silu_and_mul_kernel(
    x_ptr,  # [num_rows, 2 * size]
    out_ptr,  # [num_rows, size]
    size,
    stride_x_row,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    # [BLOCK]
    gate = tl.load(x_ptr + row * stride_x_row + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x_row + size + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + columns, gate / (1.0 + tl.exp(-gate)) * up, mask=mask)
