"""Skinny products of 8-bit floats, y = x @ weight.T + bias, of rows that are quantized in the product.

As in `skinny_gemm` there are as many programs as the device can run at once. Each holds the rows in registers and loads
the next block of the weight while it multiplies one. Each quantizes the rows itself, because a scale is known only when
the whole row is. So the norm (of x + residual too) and the quantization before the product, and silu(gate) * up after
it, take no launch of their own.

Beside the launches for more rows (`rms_norm_fp8` or `quantize`, the products of `fp8_linear`, `silu_and_mul_fp8`), for
the same input:

    x + residual; rows quantized without a norm      bit for bit
    rows quantized after a norm                      the sum of squares within rounding; where it differs, the scale may
                                                     differ in its last bits, and a number near the middle of two 8-bit
                                                     floats may be rounded to the other one
    products                                         within rounding: each is exact, but eight are summed in half
                                                     precision, then these sums in float32, in another order (cuBLAS
                                                     also sums 8-bit floats with fewer bits)
    gate, up and their product                       rounded to x's type at the same places

Among skinny products, a row's sums are added in the same order for every number of rows, as in `skinny_gemm`.

The time is that of reading the weight, N * K bytes, half of a bfloat16 weight's. 128 bytes of it are in flight for each
thread, 64 KB a multiprocessor. All programs read the rows too, 2 * K bytes (4 * K with a residual), from the L2 cache.
To read at 4.25 TB/s, a multiprocessor of an H200 must multiply 18 numbers a cycle. It can issue 128 instructions a
cycle for its threads, 7 for each number; the loop has 3 to 4.1 with one row and 5.5 to 6.7 with two, and with products
in float32 5 to 6.3 with one. The four products of a layer of Llama-3.1-8B, of which 51 us are that of reading, on an
H200, in us:

    rows                        1       2
    products in float32      68.1    93.6
    in half precision        59.2    77.2
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from proa_engine.kernels.fp8 import (
    BLOCK,
    ROUND_BEFORE,
    Fp8Form,
    dequantize_blocks,
    dequantize_rows,
    quantize_reference,
    to_fp8,
)
from proa_engine.kernels.launch import INTERPRETED, kernel, next_power_of_2
from proa_engine.kernels.products.skinny_gemm import (
    UnnormedRows,
    block_rows,
    choose_tiling,
    load_block,
    load_rows,
    row_arguments,
)
from proa_engine.kernels.rms_norm import rms_norm_reference
from proa_engine.kernels.silu_and_mul import activate_and_mul_reference

# Triton does not choose these instructions itself, which convert or multiply two numbers at once.
# A word of four 8-bit floats, two words of two halves each -> a word of two sums of two products.
MULTIPLY = tl.constexpr("""{
.reg .b16 low, high;
.reg .b32 first, last;
mov.b32 {low, high}, $1;
cvt.rn.f16x2.e4m3x2 first, low;
cvt.rn.f16x2.e4m3x2 last, high;
mul.rn.f16x2 first, first, $2;
fma.rn.f16x2 $0, last, $3, first;
}""")
ADD = tl.constexpr("add.rn.f16x2 $0, $1, $2;")
# A word of two halves -> their sum in float32.
ADD_HALVES = tl.constexpr("""{
.reg .b16 low, high;
.reg .f32 first, last;
mov.b32 {low, high}, $1;
cvt.f32.f16 first, low;
cvt.f32.f16 last, high;
add.f32 $0, first, last;
}""")
ROWS_SCALE = tl.constexpr(1 / 32)  # so that eight products of numbers up to 448 are less than the largest half


def skinny_fp8_linear(
    rows: torch.Tensor | UnnormedRows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    form: Fp8Form,
    *,
    gated: bool = False,
) -> torch.Tensor:
    """rows [T, K], weight [N, K] -> [T, N] in the rows' type; `gated`: silu(gate) * up of [gate | up], [T, N / 2].

    scales float32 [N], or [ceil(N / 128), K / 128] if `form` has groups, which are of 128. GPU only. The kernel may
    read the weight before the previous kernel has ended.
    """
    arguments = row_arguments(rows)
    x = arguments.x
    num_rows, num_inputs = x.shape
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert scales.is_contiguous()
    assert arguments.normed is None
    assert num_inputs % 16 == 0
    assert form.group is None or (form.group == BLOCK and num_inputs % BLOCK == 0)
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    tiling = choose_tiling(num_outputs, num_inputs, 2 if gated else 1, weight.element_size(), x.device)
    skinny_fp8_kernel[(tiling.num_programs,)](
        x,
        arguments.residual,
        arguments.total,
        arguments.norm_weight,
        weight,
        scales,
        form.scale,
        bias,
        out,
        num_rows,
        num_outputs,
        num_inputs,
        x.stride(0),
        arguments.eps,
        **arguments.constants,
        HAS_BIAS=bias is not None,
        GATED=gated,
        STATIC=form.is_static,
        ROUND=ROUND_BEFORE,
        ASSEMBLY=not INTERPRETED,
        GROUP=form.group or tiling.block_k,
        OUTPUTS=form.group or 1,
        ROWS=next_power_of_2(num_rows),
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        num_warps=tiling.num_warps,
    )
    return out


def skinny_fp8_linear_reference(
    rows: torch.Tensor | UnnormedRows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    form: Fp8Form,
    *,
    gated: bool = False,
) -> torch.Tensor:
    if isinstance(rows, UnnormedRows):
        if rows.residual is not None:
            torch.add(rows.x, rows.residual, out=rows.total)
        rows = rms_norm_reference(rows.total, rows.weight, rows.eps)
    dense = weight.float() * scales[:, None] if form.group is None else dequantize_blocks(weight, scales)
    x = dequantize_rows(quantize_reference(rows, form))
    y = F.linear(x, dense, None if bias is None else bias.float()).to(rows.dtype)
    return activate_and_mul_reference(y, "silu") if gated else y


@kernel(do_not_specialize=["num_rows"])
def skinny_fp8_kernel(
    x_ptr,  # [num_rows, num_inputs]
    residual_ptr,  # [num_rows, num_inputs], or nothing
    total_ptr,  # [num_rows, num_inputs]: x + residual, or nothing
    norm_weight_ptr,  # [num_inputs], or nothing
    weight_ptr,  # [num_outputs, num_inputs] float8, or [2 * num_outputs, num_inputs] if GATED
    scales_ptr,  # [ceil(weight rows / OUTPUTS), ceil(num_inputs / GROUP)]
    static_ptr,  # [1]: the scale of all rows, or nothing
    bias_ptr,  # [num_outputs] or [2 * num_outputs], or nothing
    out_ptr,  # [num_rows, num_outputs]
    num_rows,
    num_outputs,
    num_inputs,
    stride_x_row,
    eps,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    STATIC: tl.constexpr,
    ROUND: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    GROUP: tl.constexpr,  # inputs that share a scale, of a row and of the weight; BLOCK_K: all
    OUTPUTS: tl.constexpr,  # outputs that share a scale of the weight
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at least num_inputs
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    k = tl.arange(0, BLOCK_K)[None, None, :]
    first = tl.program_id(0)
    weight, scales = load_weight(
        weight_ptr, scales_ptr, first, num_outputs, num_inputs, GATED, GROUP, GROUPS, OUTPUTS, BLOCK_N, BLOCK_K
    )
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
    # Rounded to x's type before it is quantized, as in `rms_norm_kernel`.
    x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    # x [ROWS, 1, BLOCK_K], x_scales [ROWS, 1, GROUPS]; as in `store_quantized`
    if STATIC:
        static = tl.load(static_ptr)
        x_scales = tl.full((ROWS, 1, GROUPS), 1.0, tl.float32) * static
        x = x * tl.div_rn(1.0, static)
    else:
        grouped = tl.reshape(x, (ROWS, 1, GROUPS, GROUP))
        most = tl.maximum(tl.max(tl.abs(grouped), axis=3), 1e-10)
        x_scales = tl.div_rn(most, 448.0)
        x = tl.reshape(grouped * tl.div_rn(448.0, most)[:, :, :, None], (ROWS, 1, BLOCK_K))
    x_scales *= 1 / ROWS_SCALE
    x_low, x_high = pair_rows(to_fp8(x, ROUND).to(tl.float32) * ROWS_SCALE)

    row = tl.arange(0, ROWS)[:, None]
    for block in range(first, tl.cdiv(num_outputs, BLOCK_N), tl.num_programs(0)):
        following = block + tl.num_programs(0)
        next_weight, next_scales = load_weight(
            weight_ptr, scales_ptr, following, num_outputs, num_inputs, GATED, GROUP, GROUPS, OUTPUTS, BLOCK_N, BLOCK_K
        )
        sums = sum_products(weight, x_low, x_high, ASSEMBLY)
        # [ROWS, BLOCK_N or 2 * BLOCK_N, GROUPS]
        sums = tl.sum(tl.reshape(sums, (ROWS, scales.shape[1], GROUPS, GROUP // 16)), axis=3)
        y = tl.sum(sums * (x_scales * scales), axis=2)
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        n_mask = n < num_outputs
        if GATED:
            gate, up = tl.split(tl.reshape(y, (ROWS, BLOCK_N, 2)))
            if HAS_BIAS:
                gate += tl.load(bias_ptr + n, mask=n_mask, other=0.0).to(tl.float32)
                up += tl.load(bias_ptr + num_outputs + n, mask=n_mask, other=0.0).to(tl.float32)
            # Rounded as the product's outputs are that `silu_and_mul` reads.
            gate = gate.to(out_ptr.dtype.element_ty).to(tl.float32)
            up = up.to(out_ptr.dtype.element_ty).to(tl.float32)
            y = gate / (1.0 + tl.exp(-gate)) * up
        elif HAS_BIAS:
            y += tl.load(bias_ptr + n, mask=n_mask, other=0.0).to(tl.float32)
        # [ROWS, BLOCK_N]
        tl.store(out_ptr + row * num_outputs + n, y, mask=(row < num_rows) & n_mask)
        weight = next_weight
        scales = next_scales


@triton.jit
def load_weight(
    weight_ptr,
    scales_ptr,
    block,
    num_outputs,
    num_inputs,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Load the weight's rows of a block, [1, N, BLOCK_K / 4] int32, and their scales, [1, N, GROUPS]; N: BLOCK_N, twice
    as much if GATED.

    Words and not bytes, because bytes that a loop carries take a register each.
    """
    words_ptr = weight_ptr.to(tl.pointer_type(tl.int32))
    word = tl.arange(0, BLOCK_K // 4)[None, None, :]
    weight = load_block(words_ptr, block, word, num_outputs, num_inputs // 4, GATED, BLOCK_N)
    output, weight_row = block_rows(block, num_outputs, GATED, BLOCK_N)
    num_groups = tl.cdiv(num_inputs, GROUP)
    group = tl.arange(0, GROUPS)[None, None, :]
    mask = (output < num_outputs) & (group < num_groups)
    return weight, tl.load(scales_ptr + weight_row // OUTPUTS * num_groups + group, mask=mask, other=0.0)


@triton.jit
def pair_rows(x):
    """[R, 1, K] float32 -> two of [R, 1, K / 4] int32: the first and the last two of each four numbers as halves."""
    even, odd = tl.split(tl.reshape(x.to(tl.float16), (x.shape[0], 1, x.shape[2] // 2, 2)))
    low = even.to(tl.uint16, bitcast=True).to(tl.int32)
    pairs = low | (odd.to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    return tl.split(tl.reshape(pairs, (x.shape[0], 1, x.shape[2] // 4, 2)))


@triton.jit
def sum_products(weight, x_low, x_high, ASSEMBLY: tl.constexpr):
    """weight [1, N, K / 4], rows as of `pair_rows` -> the sums of 16 products each, [R, N, K / 16] float32.

    Eight products are added in half precision, of even inputs and of odd ones.
    """
    SIXTEENS: tl.constexpr = weight.shape[2] // 4
    if ASSEMBLY:
        pairs = tl.inline_asm_elementwise(
            MULTIPLY, "=r,r,r,r", [weight, x_low, x_high], dtype=tl.int32, is_pure=True, pack=1
        )
        pairs = tl.reduce(tl.reshape(pairs, (x_low.shape[0], weight.shape[1], SIXTEENS, 4)), 3, add_pairs)
        return tl.inline_asm_elementwise(ADD_HALVES, "=f,r", [pairs], dtype=tl.float32, is_pure=True, pack=1)
    even = half(x_low) * float_of_byte(weight) + half(x_high) * float_of_byte(weight >> 16)
    odd = half(x_low >> 16) * float_of_byte(weight >> 8) + half(x_high >> 16) * float_of_byte(weight >> 24)
    even = tl.sum(tl.reshape(even, (x_low.shape[0], weight.shape[1], SIXTEENS, 4)), axis=3)
    odd = tl.sum(tl.reshape(odd, (x_low.shape[0], weight.shape[1], SIXTEENS, 4)), axis=3)
    return even.to(tl.float32) + odd.to(tl.float32)


@triton.jit
def add_pairs(a, b):
    return tl.inline_asm_elementwise(ADD, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def half(word):
    """The lower half of a word."""
    return word.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def float_of_byte(word):
    """The lowest 8-bit float of a word, in half precision."""
    return word.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32).to(tl.float16)
