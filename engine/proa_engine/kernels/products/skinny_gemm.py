"""Skinny products, y = x @ weight.T + bias: of one or two rows, which take as long as reading the weight.

There are as many programs as the device can run at once. Each holds the rows in registers and iterates over blocks of
the weight: it loads the next block while it multiplies one, and the first before the rows are ready. It fuses the
RMSNorm of the rows (of x + residual too) before the product, and silu(gate) * up after it.

For models' sizes a row's sums are added in the same order for every number of rows. For others (300 inputs) Triton may
divide one row among the threads in another way than two rows; in float32 the last bits show it.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from proa_engine.kernels.fp8 import Fp8Form, QuantizedRows
from proa_engine.kernels.launch import cdiv, kernel, next_power_of_2, num_multiprocessors
from proa_engine.kernels.rms_norm import rms_norm_reference
from proa_engine.kernels.silu_and_mul import activate_and_mul_reference

MAX_ROWS = 2  # with more rows the arithmetic takes longer than reading the weight
MAX_INPUTS = 16384  # a row must fit in a program's registers
MAX_INPUTS_OF_TWO_ROWS = 8192  # with more, two rows would spill registers
WARPS_PER_MULTIPROCESSOR = 16  # with 128 registers a thread
THREAD_BYTES = (
    128  # bytes of the weight in flight for each thread: 64 KB a multiprocessor, twice latency times bandwidth
)
FULL_ENOUGH = 0.9  # least share of the programs that work in the average round


@dataclass(frozen=True, slots=True)
class SkinnyGemm:
    """Input form of a product that computes the norm of up to so many rows itself."""

    max_rows: int = MAX_ROWS

    def for_rows(self, num_rows: int) -> "SkinnyGemm | PlainRows":
        return self if 0 < num_rows <= self.max_rows else PLAIN


@dataclass(frozen=True, slots=True)
class PlainRows:
    """Input form of a product that reads a tensor."""

    def for_rows(self, num_rows: int) -> Self:
        return self


PLAIN = PlainRows()


def skinny_gemm_form(weight: torch.Tensor) -> SkinnyGemm | PlainRows:
    """The input form of products by `weight` [N, K], which may have no skinny kernel."""
    fits = not weight.is_cpu and weight.shape[1] <= MAX_INPUTS and weight.numel() < 1 << 31
    return SkinnyGemm(MAX_ROWS if weight.shape[1] <= MAX_INPUTS_OF_TWO_ROWS else 1) if fits else PLAIN


@dataclass(frozen=True, slots=True, eq=False)
class UnnormedRows:
    """norm(x + residual) [T, K] before it is computed; the product that reads it computes it."""

    x: torch.Tensor  # [T, K]
    residual: torch.Tensor | None  # [T, K]
    total: torch.Tensor  # [T, K]: x + residual, once the product has run; x itself without a residual
    weight: torch.Tensor  # [K], the norm's
    eps: float
    normed: torch.Tensor | None = None  # [T, K]: the norm, once the product has run; None: it is not kept

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    def keeping_norm(self) -> "UnnormedRows":
        """The same rows, whose norm the product also stores, rounded to their type, and multiplies so rounded."""
        return replace(self, normed=torch.empty_like(self.total, memory_format=torch.contiguous_format))


def unnormed_rows(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> UnnormedRows:
    if residual is None:
        return UnnormedRows(x, None, x, weight, eps)
    assert residual.is_contiguous()
    # The sum is a new tensor, because all programs read the residual while one writes the sum.
    return UnnormedRows(x, residual, torch.empty_like(residual), weight, eps)


class RowArguments(NamedTuple):
    """Rows [T, K] as arguments of the skinny kernels, with or without a norm before the product."""

    x: torch.Tensor
    residual: torch.Tensor | None
    total: torch.Tensor | None
    norm_weight: torch.Tensor | None
    normed: torch.Tensor | None
    eps: float

    @property
    def constants(self) -> dict[str, object]:
        return {"HAS_NORM": self.norm_weight is not None, "HAS_RESIDUAL": self.residual is not None}


def row_arguments(rows: torch.Tensor | UnnormedRows) -> RowArguments:
    if isinstance(rows, UnnormedRows):
        return RowArguments(rows.x, rows.residual, rows.total, rows.weight, rows.normed, rows.eps)
    return RowArguments(rows, None, None, None, None, 0.0)


@dataclass(frozen=True, slots=True)
class Tiling:
    num_programs: int
    block_n: int  # outputs that a program computes in a round
    block_k: int
    num_warps: int


def choose_tiling(num_outputs: int, num_inputs: int, parts: int, item_bytes: int, device: torch.device) -> Tiling:
    """Tiling for a weight with `parts` rows for each output. It does not depend on the number of rows."""
    block_k = next_power_of_2(num_inputs)
    num_warps = 4 if block_k <= 1024 else 8 if block_k <= 4096 else 16
    slots = num_multiprocessors(device) * WARPS_PER_MULTIPROCESSOR // num_warps
    block_n = max(THREAD_BYTES * 32 * num_warps // (block_k * item_bytes * parts), 1)
    while block_n > 1 and _share_of_slots(cdiv(num_outputs, block_n), slots) < FULL_ENOUGH:
        block_n //= 2
    return Tiling(min(slots, cdiv(num_outputs, block_n)), block_n, block_k, num_warps)


def _share_of_slots(num_blocks: int, slots: int) -> float:
    """Share of the programs that work in the average round."""
    num_rounds = -(-num_blocks // slots)
    return num_blocks / (num_rounds * slots)


def skinny_gemm_linear(
    rows: torch.Tensor | UnnormedRows, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False
) -> torch.Tensor:
    """rows [T, K], weight [N, K] -> [T, N] in the rows' type; `gated`: silu(gate) * up of [gate | up], [T, N / 2].

    GPU only. The kernel may read the weight before the previous kernel has ended.
    """
    arguments = row_arguments(rows)
    x = arguments.x
    num_rows, num_inputs = x.shape
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    tiling = choose_tiling(num_outputs, num_inputs, 2 if gated else 1, weight.element_size(), x.device)
    skinny_gemm_kernel[(tiling.num_programs,)](
        x,
        arguments.residual,
        arguments.total,
        arguments.norm_weight,
        arguments.normed,
        weight,
        bias,
        out,
        num_rows,
        num_outputs,
        num_inputs,
        x.stride(0),
        arguments.eps,
        **arguments.constants,
        KEEPS_NORM=arguments.normed is not None,
        HAS_BIAS=bias is not None,
        GATED=gated,
        ROWS=next_power_of_2(num_rows),
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        num_warps=tiling.num_warps,
    )
    return out


def skinny_gemm_linear_reference(
    rows: torch.Tensor | UnnormedRows, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False
) -> torch.Tensor:
    if isinstance(rows, UnnormedRows):
        if rows.residual is not None:
            torch.add(rows.x, rows.residual, out=rows.total)
        normed = rms_norm_reference(rows.total, rows.weight, rows.eps)
        rows = normed if rows.normed is None else rows.normed.copy_(normed)
    y = F.linear(rows, weight, bias)
    return activate_and_mul_reference(y, "silu") if gated else y


@kernel(do_not_specialize=["num_rows"])
def skinny_gemm_kernel(
    x_ptr,  # [num_rows, num_inputs]
    residual_ptr,  # [num_rows, num_inputs], or nothing
    total_ptr,  # [num_rows, num_inputs]: x + residual, or nothing
    norm_weight_ptr,  # [num_inputs], or nothing
    normed_ptr,  # [num_rows, num_inputs]: the norm, or nothing
    weight_ptr,  # [num_outputs, num_inputs], or [2 * num_outputs, num_inputs] if GATED
    bias_ptr,  # [num_outputs] or [2 * num_outputs], or nothing
    out_ptr,  # [num_rows, num_outputs]
    num_rows,
    num_outputs,
    num_inputs,
    stride_x_row,
    eps,
    HAS_NORM: tl.constexpr,
    KEEPS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at least num_inputs
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    k = tl.arange(0, BLOCK_K)[None, None, :]
    first = tl.program_id(0)
    weight = load_block(weight_ptr, first, k, num_outputs, num_inputs, GATED, BLOCK_N)
    x = load_rows(
        x_ptr,
        residual_ptr,
        total_ptr,
        norm_weight_ptr,
        k,
        num_rows,
        num_inputs,
        stride_x_row,
        eps,
        HAS_NORM,
        HAS_RESIDUAL,
        ROWS,
        PDL,
    )
    if KEEPS_NORM:
        x = x.to(normed_ptr.dtype.element_ty).to(tl.float32)
        if first == 0:
            row = tl.arange(0, ROWS)[:, None, None]
            tl.store(normed_ptr + row * num_inputs + k, x, mask=(row < num_rows) & (k < num_inputs))

    out_row = tl.arange(0, ROWS)[:, None]
    for block in range(first, tl.cdiv(num_outputs, BLOCK_N), tl.num_programs(0)):
        following = load_block(weight_ptr, block + tl.num_programs(0), k, num_outputs, num_inputs, GATED, BLOCK_N)
        y = tl.sum(x * weight.to(tl.float32), axis=2)
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        n_mask = n < num_outputs
        if GATED:
            gate, up = tl.split(tl.reshape(y, (ROWS, BLOCK_N, 2)))
            if HAS_BIAS:
                gate += tl.load(bias_ptr + n, mask=n_mask, other=0.0).to(tl.float32)
                up += tl.load(bias_ptr + num_outputs + n, mask=n_mask, other=0.0).to(tl.float32)
            y = gate / (1.0 + tl.exp(-gate)) * up
        elif HAS_BIAS:
            y += tl.load(bias_ptr + n, mask=n_mask, other=0.0).to(tl.float32)
        # [ROWS, BLOCK_N]
        tl.store(out_ptr + out_row * num_outputs + n, y, mask=(out_row < num_rows) & n_mask)
        weight = following


# The tensors of these functions have three dimensions, [rows, outputs, BLOCK_K], so that threads multiply the elements
# that they loaded.


@triton.jit
def load_rows(
    x_ptr,
    residual_ptr,
    total_ptr,
    norm_weight_ptr,
    k,  # [1, 1, BLOCK_K]
    num_rows,
    num_inputs,
    stride_x_row,
    eps,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Wait for the previous kernel, then load the rows, [ROWS, 1, BLOCK_K] float32, and compute their norm."""
    row = tl.arange(0, ROWS)[:, None, None]
    k_mask = k < num_inputs
    mask = (row < num_rows) & k_mask
    if HAS_NORM:
        norm_weight = tl.load(norm_weight_ptr + k, mask=k_mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * stride_x_row + k, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * num_inputs + k, mask=mask, other=0.0).to(tl.float32)
        # Rounded to the residual's type before the norm, as in the reference.
        x = x.to(residual_ptr.dtype.element_ty).to(tl.float32)
        if tl.program_id(0) == 0:
            tl.store(total_ptr + row * num_inputs + k, x, mask=mask)
    if HAS_NORM:
        mean = tl.sum(x * x, axis=2, keep_dims=True) / num_inputs
        x = x * (1.0 / tl.sqrt(mean + eps)) * norm_weight
    return x


@triton.jit
def block_rows(block, num_outputs, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return a block's outputs and the weight's rows of them, [1, BLOCK_N, 1] each; if GATED [1, 2 * BLOCK_N, 1], the
    rows of gate and up alternating."""
    if GATED:
        turn = tl.arange(0, 2 * BLOCK_N)[None, :, None]
        output = block * BLOCK_N + turn // 2
        weight_row = output + turn % 2 * num_outputs
    else:
        output = block * BLOCK_N + tl.arange(0, BLOCK_N)[None, :, None]
        weight_row = output
    return output, weight_row


@triton.jit
def load_block(weight_ptr, block, k, num_outputs, num_inputs, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load the weight's rows of a block, [1, BLOCK_N or 2 * BLOCK_N, BLOCK_K]."""
    output, weight_row = block_rows(block, num_outputs, GATED, BLOCK_N)
    place = weight_row * num_inputs + k
    mask = (output < num_outputs) & (k < num_inputs)
    return tl.load(weight_ptr + place, mask=mask, other=0.0, eviction_policy="evict_first")


@dataclass(frozen=True, slots=True, eq=False)
class SkinnyFp8:
    """Input form of a product of 8-bit floats: one or two rows as `skinny` has them, more rows quantized beforehand."""

    skinny: SkinnyGemm
    quantized: Fp8Form

    def for_rows(self, num_rows: int) -> SkinnyGemm | Fp8Form:
        skinny = self.skinny.for_rows(num_rows)
        return skinny if isinstance(skinny, SkinnyGemm) else self.quantized


class InputForm(Protocol):
    """The form in which a product takes its input."""

    def for_rows(self, num_rows: int) -> SkinnyGemm | Fp8Form | PlainRows:
        """Return the form for so many rows, after the norm."""
        ...


Activation = torch.Tensor | QuantizedRows | UnnormedRows
