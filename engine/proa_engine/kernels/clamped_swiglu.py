"""The gated activation of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), with gate and up clamped beforehand.

One program for each block of a row.
"""

from dataclasses import dataclass

import torch
import triton.language as tl

from proa_engine.kernels.launch import kernel
from proa_engine.kernels.sizes import cdiv

BLOCK = 1024


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """x [T, 2N] of [gate | up] -> [T, N]"""

    alpha: float
    limit: float  # upper limit of gate, and limit of |up|

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return clamped_swiglu_reference(x, self) if x.is_cpu else _clamped_swiglu_triton(x, self)


def clamped_swiglu_reference(x: torch.Tensor, options: ClampedSwiGLU) -> torch.Tensor:
    """Computed with exp, for the reason given in `activate_and_mul_reference`."""
    gate, up = x.chunk(2, dim=-1)
    gate = gate.clamp(max=options.limit)
    up = up.clamp(-options.limit, options.limit)
    return torch.div(gate, (gate * -options.alpha).exp_().add_(1)).mul_(up.add_(1))


def _clamped_swiglu_triton(x: torch.Tensor, options: ClampedSwiGLU) -> torch.Tensor:
    num_rows, size = x.shape[0], x.shape[1] // 2
    assert x.is_contiguous()
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    grid = (num_rows, cdiv(size, BLOCK))
    clamped_swiglu_kernel[grid](x, out, size, ALPHA=options.alpha, LIMIT=options.limit, BLOCK=BLOCK)
    return out


@kernel
def clamped_swiglu_kernel(
    x_ptr,  # [num_rows, 2 * size]
    out_ptr,  # [num_rows, size]
    size,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
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
    gate = tl.load(x_ptr + row * 2 * size + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + (row * 2 + 1) * size + columns, mask=mask, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, LIMIT)
    up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    tl.store(out_ptr + row * size + columns, gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0), mask=mask)
