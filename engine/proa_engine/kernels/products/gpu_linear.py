"""Matrix products on a GPU: y = x @ weight.T + bias.

cuBLAS; for one or two rows a Triton kernel (`skinny_gemm_linear`), which also fuses the norm before and the activation
after the product; for a few more another one (`few_rows_linear`), which fuses the activation.

In batch-invariant products a row's bits do not depend on the other rows. There a weight has one tiling for every number
of rows. A program computes a tile [BLOCK_M, BLOCK_N] and adds the products of BLOCK_K inputs at a time, in float32, in
the order of the inputs; a row's position in its tile has no effect. float32 inputs are multiplied without tensor cores.
"""

from typing import TypeGuard

import torch
import torch.nn.functional as F
import triton.language as tl

from proa_engine.kernels.fp8 import Fp8Form, QuantizedRows
from proa_engine.kernels.launch import begin, cdiv, kernel
from proa_engine.kernels.products.few_rows import FewRowsLinear
from proa_engine.kernels.products.linear import Linear
from proa_engine.kernels.products.product_tile import ROWS_TOGETHER, store_tile
from proa_engine.kernels.products.skinny_gemm import (
    Activation,
    SkinnyGemm,
    UnnormedRows,
    skinny_gemm_form,
    skinny_gemm_linear,
)
from proa_engine.kernels.silu_and_mul import activate_as
from proa_engine.kernels.tilings import tilings_of

BLOCK_M = 64  # the fewest rows of Hopper's wgmma instructions
MANY_OUTPUTS = 1 << 14  # outputs that keep every multiprocessor busy even with wide tiles


class InvariantLinear:
    """A weight [out_features, in_features] with an optional bias [out_features]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features]"""
        return invariant_linear(x, self.weight, self.bias)


def invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, inputs], weight [outputs, inputs] -> [rows, outputs] in x's type. Reference: `F.linear`."""
    num_rows, num_inputs = x.shape
    num_outputs = weight.shape[0]
    assert x.is_contiguous()
    assert weight.is_contiguous()
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    of_32_bits, of_few_outputs, of_many_outputs = tilings_of(x.device).invariant
    of_16_bits = of_many_outputs if num_outputs >= MANY_OUTPUTS else of_few_outputs
    tile = of_32_bits if x.element_size() == 4 else of_16_bits
    invariant_linear_kernel[(cdiv(num_outputs, tile.outputs), cdiv(num_rows, BLOCK_M))](
        x,
        weight,
        bias,
        out,
        num_rows,
        num_outputs,
        num_inputs,
        HAS_BIAS=bias is not None,
        ROWS_TOGETHER=ROWS_TOGETHER,
        BLOCK_M=BLOCK_M,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        num_warps=4,
        num_stages=tile.num_stages,
    )
    return out


@kernel(do_not_specialize=["num_rows"])
def invariant_linear_kernel(
    x_ptr,  # [num_rows, num_inputs]
    weight_ptr,  # [num_outputs, num_inputs]
    bias_ptr,  # [num_outputs], or nothing
    out_ptr,  # [num_rows, num_outputs]
    num_rows,
    num_outputs,
    num_inputs,
    HAS_BIAS: tl.constexpr,
    ROWS_TOGETHER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row_block, column_block = tl.swizzle2d(
        tl.program_id(1), tl.program_id(0), tl.num_programs(1), tl.num_programs(0), ROWS_TOGETHER
    )
    row = (row_block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (column_block * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row_mask = row < num_rows
    column_mask = column < num_outputs
    inner = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, num_inputs, BLOCK_K):
        index = start + inner
        index_mask = index < num_inputs
        x = tl.load(
            x_ptr + row[:, None] * num_inputs + index[None, :],
            mask=row_mask[:, None] & index_mask[None, :],
            other=0.0,
        )
        # [BLOCK_N, BLOCK_K]
        weight = tl.load(
            weight_ptr + column[:, None] * num_inputs + index[None, :],
            mask=column_mask[:, None] & index_mask[None, :],
            other=0.0,
        )
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    store_tile(out_ptr, total, bias_ptr, row, column, num_rows, num_outputs, HAS_BIAS)


class GpuLinear:
    """A weight [out_features, in_features] with an optional bias [out_features]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.input_form = skinny_gemm_form(weight)
        self.few_rows = FewRowsLinear(weight, None, bias)

    def __call__(self, x: Activation) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features]"""
        if self._is_skinny(x):
            return skinny_gemm_linear(x, self.weight, self.bias)
        assert isinstance(x, torch.Tensor)
        tiling = self.few_rows.tiling(x.shape[0])
        return F.linear(x, self.weight, self.bias) if tiling is None else self.few_rows(x, tiling)

    def gated(self, x: Activation, form: Fp8Form | None = None) -> torch.Tensor | QuantizedRows:
        """x [rows, in_features] -> silu(gate) * up, [rows, out_features / 2], of outputs [gate | up].

        Quantized to `form`, if that takes no launch of its own.
        """
        if self._is_skinny(x):
            return skinny_gemm_linear(x, self.weight, self.bias, gated=True)
        assert isinstance(x, torch.Tensor)
        tiling = self.few_rows.tiling(x.shape[0])
        if tiling is not None:
            return self.few_rows(x, tiling, gated=True)
        return activate_as(F.linear(x, self.weight, self.bias), "silu", form)

    def _is_skinny(self, x: Activation) -> TypeGuard[torch.Tensor | UnnormedRows]:
        return isinstance(self.input_form.for_rows(x.shape[0]), SkinnyGemm)


def make_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, batch_invariant: bool = False
) -> Linear | GpuLinear | InvariantLinear:
    """Return the product by weight [out_features, in_features] for its device. On a CPU it is always
    batch-invariant."""
    if weight.is_cpu:
        return Linear(weight, bias)
    return InvariantLinear(weight, bias) if batch_invariant else GpuLinear(weight, bias)


class HeadLinear:
    """y[t, h] = x[t, h] @ weight[h].T. On a CPU a token's bits do not depend on the batch."""

    def __init__(self, weight: torch.Tensor) -> None:
        """weight [heads, out_features, in_features]"""
        self.weight = weight
        self.products = [Linear(each) for each in weight.unbind()] if weight.is_cpu else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, heads, in_features] -> [T, heads, out_features]"""
        if self.products is None:
            return torch.bmm(x.transpose(0, 1), self.weight.transpose(1, 2)).transpose(0, 1)
        pairs = zip(self.products, x.unbind(1), strict=True)
        return torch.stack([product(rows.contiguous()) for product, rows in pairs], dim=1)
