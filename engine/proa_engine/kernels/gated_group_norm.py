"""RMSNorm of x * silu(gate) over groups of values (Mamba2, Dao and Gu 2024), in float32.

One program computes one group of one token, held in one tile.
"""

import torch
import triton.language as tl

from proa_engine.kernels.launch import INTERPRETED, begin, kernel, next_power_of_2


def gated_group_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, group_size: int, eps: float
) -> torch.Tensor:
    """x, gate [T, groups * group_size], weight [groups * group_size] -> the shape of x, in its type."""
    if x.is_cpu and not INTERPRETED:
        return gated_group_norm_reference(x, gate, weight, group_size, eps)
    num_tokens, width = x.shape
    assert x.is_contiguous()
    assert gate.stride(1) == 1
    out = torch.empty_like(x)
    block = next_power_of_2(group_size)
    gated_group_norm_kernel[(num_tokens, width // group_size)](
        x,
        gate,
        weight,
        out,
        gate.stride(0),
        eps,
        NUM_GROUPS=width // group_size,
        SIZE=group_size,
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 16),
    )
    return out


def gated_group_norm_reference(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, group_size: int, eps: float
) -> torch.Tensor:
    """A row's bits do not depend on the other rows."""
    values = gated_values(x, gate).view(len(x), -1, group_size)
    norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    scale = torch.addcmul(norm.new_full((), eps), norm, norm, value=1 / group_size).rsqrt_()
    return values.mul_(scale).view_as(x).mul_(weight).to(x.dtype)


def gated_values(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * silu(gate) in float32, with exp for the reason given in `activate_and_mul_reference`."""
    z = gate.float()
    return torch.div(z, z.neg().exp_().add_(1)).mul_(x)


@kernel
def gated_group_norm_kernel(
    x_ptr,  # [num_tokens, NUM_GROUPS, SIZE]
    gate_ptr,  # [num_tokens, NUM_GROUPS * SIZE]
    weight_ptr,  # [NUM_GROUPS, SIZE]
    out_ptr,  # [num_tokens, NUM_GROUPS, SIZE]
    stride_gate_token,
    eps,
    NUM_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    index = tl.arange(0, BLOCK)
    mask = index < SIZE
    place = (token * NUM_GROUPS + group) * SIZE + index
    # [BLOCK]
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * stride_gate_token + group * SIZE + index, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + group * SIZE + index, mask=mask, other=0.0).to(tl.float32)
    value = x * gate / (1.0 + tl.exp(-gate))
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    tl.store(out_ptr + place, value * scale * weight, mask=mask)
