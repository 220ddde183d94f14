"""Gated activations (Shazeer 2020): y = activation(gate) * up for x = [gate | up].

    silu        gate * sigmoid(gate) * up (SwiGLU)
    gelu_tanh   gate * sigmoid(2 * sqrt(2 / pi) * (gate + 0.044715 * gate³)) * up (GeGLU, GELU approximated by tanh)

Optionally quantized to 8-bit floats. One program computes a block of one row, or the whole row if it is quantized.
`ClampedSwiGLU` is that of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), with gate and up clamped beforehand.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import triton
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
from proa_engine.kernels.launch import INTERPRETED, begin, cdiv, kernel, next_power_of_2

ActivationName = Literal["silu", "gelu_tanh"]

BLOCK = 1024
GELU_FACTOR = tl.constexpr(2 * math.sqrt(2 / math.pi))
GELU_CUBIC = tl.constexpr(0.044715)


def activate_and_mul(x: torch.Tensor, activation: ActivationName) -> torch.Tensor:
    """x [T, 2N] -> [T, N]"""
    if x.is_cpu and not INTERPRETED:
        return activate_and_mul_reference(x, activation)
    out = torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype, device=x.device)
    _launch(x, _constants(activation), plain_out(out))
    return out


def activate_and_mul_fp8(x: torch.Tensor, activation: ActivationName, form: Fp8Form) -> QuantizedRows:
    """x [T, 2N] -> the rows of `activate_and_mul`, [T, N], quantized."""
    if x.is_cpu and not INTERPRETED:
        return quantize_reference(activate_and_mul_reference(x, activation), form)
    out = empty_rows(x.shape[0], x.shape[1] // 2, form, x)
    _launch(x, _constants(activation), quantized_out(out, form))
    return out


def activate_as(x: torch.Tensor, activation: ActivationName, form: Fp8Form | None) -> torch.Tensor | QuantizedRows:
    """x [T, 2N] -> [T, N], quantized to `form` if that is given."""
    return activate_and_mul(x, activation) if form is None else activate_and_mul_fp8(x, activation, form)


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """x [T, 2N] of [gate | up] -> [T, N]"""

    name: ActivationName

    @property
    def constants(self) -> dict[str, object]:
        """The constants of `activate_product`."""
        return _constants(self.name)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return activate_and_mul(x, self.name)


silu_and_mul = GatedActivation("silu")


def silu_and_mul_fp8(x: torch.Tensor, form: Fp8Form) -> QuantizedRows:
    """x [T, 2N] -> the rows of `silu_and_mul`, [T, N], quantized."""
    return activate_and_mul_fp8(x, "silu", form)


def activate_and_mul_reference(x: torch.Tensor, activation: ActivationName) -> torch.Tensor:
    """x [T, 2N] -> [T, N]

    Silu is computed with exp, because the bits of `F.silu` on a CPU depend on where each thread's share of the batch
    begins.
    """
    if activation == "silu":
        gate, up = x.chunk(2, dim=-1)
        return torch.div(gate, gate.neg().exp_().add_(1)).mul_(up)
    gate, up = x.float().chunk(2, dim=-1)
    exponent = (gate * gate).mul_(GELU_CUBIC.value).add_(1).mul_(gate).mul_(-GELU_FACTOR.value)
    return torch.div(gate, exponent.exp_().add_(1)).mul_(up).to(x.dtype)


def _constants(name: str, alpha: float = 0.0, limit: float = 0.0) -> dict[str, object]:
    return {"ACTIVATION": name, "ALPHA": alpha, "LIMIT": limit}


def _launch(x: torch.Tensor, constants: dict[str, object], out: RowsOut) -> None:
    """x [T, 2N], for N values of each row of `out`"""
    num_rows, size = out.values.shape
    assert x.stride(-1) == 1
    block = next_power_of_2(size) if out.is_quantized else BLOCK
    activate_and_mul_kernel[(num_rows, cdiv(size, block))](
        x,
        out.values,
        out.scales,
        out.static,
        size,
        x.stride(0),
        **constants,
        BLOCK=block,
        **out.constants,
        num_warps=num_warps(block) if out.is_quantized else 4,
    )


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """gate, up [...] float32 -> activation(gate) * up"""
    if ACTIVATION == "silu":
        y = gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == "gelu_tanh":
        y = gate / (1.0 + tl.exp(gate * (gate * gate * GELU_CUBIC + 1.0) * -GELU_FACTOR)) * up
    else:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        y = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
    return y


@triton.jit
def activate_product(x, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """x [rows, 2N] float32, of which gate and up are in turn, or [rows, N] for relu_squared -> [rows, N]"""
    if ACTIVATION == "relu_squared":
        x = tl.maximum(x, 0.0)
        y = x * x
    else:
        gate, up = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        y = activate(gate, up, ACTIVATION, ALPHA, LIMIT)
    return y


@kernel
def activate_and_mul_kernel(
    x_ptr,  # [num_rows, 2 * size]
    out_ptr,  # [num_rows, size]
    scales_ptr,  # [num_rows, size / GROUP]; None unless QUANTIZE
    static_ptr,  # [1]; None unless STATIC
    size,
    stride_x_row,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,  # at least size if QUANTIZE
    QUANTIZE: tl.constexpr,
    GROUP: tl.constexpr,  # 0: one scale for the whole row
    STATIC: tl.constexpr,
    ROUND: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    # [BLOCK]
    gate = tl.load(x_ptr + row * stride_x_row + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x_row + size + columns, mask=mask, other=0.0).to(tl.float32)
    y = activate(gate, up, ACTIVATION, ALPHA, LIMIT)
    if QUANTIZE:
        # Rounded to x's type before it is quantized, as in the reference.
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
        store_quantized(y, row, out_ptr, scales_ptr, static_ptr, size, BLOCK, GROUP, STATIC, ROUND)
    else:
        tl.store(out_ptr + row * size + columns, y, mask=mask)


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """x [T, 2N] of [gate | up] -> [T, N]"""

    alpha: float
    limit: float  # upper limit of gate, and limit of |up|

    @property
    def constants(self) -> dict[str, object]:
        """As of `GatedActivation`."""
        return _constants("clamped", self.alpha, self.limit)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cpu and not INTERPRETED:
            return clamped_swiglu_reference(x, self)
        out = torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype, device=x.device)
        _launch(x, self.constants, plain_out(out))
        return out


def clamped_swiglu_reference(x: torch.Tensor, options: ClampedSwiGLU) -> torch.Tensor:
    """Computed with exp, for the reason given in `activate_and_mul_reference`."""
    gate, up = x.chunk(2, dim=-1)
    gate = gate.clamp(max=options.limit)
    up = up.clamp(-options.limit, options.limit)
    return torch.div(gate, (gate * -options.alpha).exp_().add_(1)).mul_(up.add_(1))
