"""RMSNorm by head, times a gate: y = weight * x / sqrt(mean(x²) + eps) * silu(z), in float32.

One program computes one head of one token.
"""

import torch
import triton.language as tl

from proa_engine.kernels.launch import kernel
from proa_engine.kernels.rms_norm import rms_norm_reference
from proa_engine.kernels.sizes import next_power_of_2


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x, gate [T, heads * N], weight [N] -> [T, heads * N] in x's type"""
    return gated_rms_norm_reference(x, gate, weight, eps) if x.is_cpu else _gated_rms_norm_triton(x, gate, weight, eps)


def gated_rms_norm_reference(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """With exp for the gate, as in `activate_and_mul_reference`."""
    normed = rms_norm_reference(x.float().view(len(x), -1, weight.shape[0]), weight.float(), eps).view_as(x)
    z = gate.float()
    return normed.mul_(torch.div(z, z.neg().exp_().add_(1))).to(x.dtype)


def _gated_rms_norm_triton(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
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
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
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
