"""Matrix products of 8-bit floats: y = x @ weight.T + bias, both quantized, summed in float32.

With one scale for each row of x and each output of the weight: cuBLAS through `torch._scaled_mm`. With one for each 128
inputs of a row and each 128 x 128 block of the weight: a Triton kernel, in which a program computes a tile [BLOCK_M,
BLOCK_N]; products of 128 inputs are summed, then scaled in float32, in the same order for every number of rows. On a
CPU, the reference: a float32 product of dequantized tensors, which differs from the GPU's only in the rounding of sums.
One or two rows take the kernel of `skinny_fp8` in place of both, which also quantizes them; a few more with one scale
each take that of `few_rows` in place of cuBLAS.
"""

from typing import TypeGuard

import torch
import triton.language as tl

from proa_engine.kernels.fp8 import (
    BLOCK,
    Fp8Form,
    QuantizedRows,
    check_device,
    dequantize_blocks,
    dequantize_rows,
    quantize,
)
from proa_engine.kernels.launch import cdiv, kernel
from proa_engine.kernels.products.few_rows import FewRowsLinear
from proa_engine.kernels.products.linear import Linear
from proa_engine.kernels.products.product_tile import ROWS_TOGETHER, rows_per_program, store_tile
from proa_engine.kernels.products.skinny_fp8 import skinny_fp8_linear
from proa_engine.kernels.products.skinny_gemm import (
    Activation,
    InputForm,
    SkinnyFp8,
    SkinnyGemm,
    UnnormedRows,
    skinny_gemm_form,
)
from proa_engine.kernels.silu_and_mul import activate_as
from proa_engine.kernels.tilings import tilings_of

MULTIPLE = 16  # cuBLAS requires sizes that are multiples of this


def fp8_block_matmul(
    x: QuantizedRows, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [rows, K], weight [N, K], scales [ceil(N / 128), K / 128] -> [rows, N] in x's type. GPU only.

    Its reference is the product of the dequantized tensors.
    """
    num_rows, num_inputs = x.values.shape
    num_outputs = weight.shape[0]
    assert num_inputs % BLOCK == 0
    assert weight.is_contiguous()
    assert scales.is_contiguous()
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=weight.device)
    block_m = rows_per_program(num_rows)
    tile = tilings_of(weight.device).fp8_blocks[block_m]
    grid = (cdiv(num_rows, block_m) * cdiv(num_outputs, tile.outputs),)
    fp8_block_matmul_kernel[grid](
        x.values,
        x.scales,
        weight,
        scales,
        bias,
        out,
        num_rows,
        num_outputs,
        num_inputs,
        BLOCK_M=block_m,
        BLOCK_N=tile.outputs,
        BLOCK_K=BLOCK,
        HAS_BIAS=bias is not None,
        ROWS_TOGETHER=ROWS_TOGETHER,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


@kernel(do_not_specialize=["num_rows"])
def fp8_block_matmul_kernel(
    x_ptr,  # [num_rows, num_inputs] float8
    x_scales_ptr,  # [num_rows, num_inputs / BLOCK_K]
    weight_ptr,  # [num_outputs, num_inputs] float8
    weight_scales_ptr,  # [ceil(num_outputs / BLOCK_K), num_inputs / BLOCK_K]
    bias_ptr,  # [num_outputs], or nothing
    out_ptr,  # [num_rows, num_outputs]
    num_rows,
    num_outputs,
    num_inputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides BLOCK_K, so that a tile has one scale of the weight
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS_TOGETHER: tl.constexpr,
):
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tiles_n = tl.cdiv(num_outputs, BLOCK_N)
    program = tl.program_id(0)
    tile_m, tile_n = tl.swizzle2d(program // tiles_n, program % tiles_n, tiles_m, tiles_n, ROWS_TOGETHER)

    row = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row_mask = row < num_rows
    column_mask = column < num_outputs
    inner = tl.arange(0, BLOCK_K)
    num_groups = num_inputs // BLOCK_K
    x_place = x_ptr + row[:, None] * num_inputs + inner[None, :]
    weight_place = weight_ptr + column[None, :] * num_inputs + inner[:, None]
    weight_scale_place = weight_scales_ptr + (tile_n * BLOCK_N // BLOCK_K) * num_groups
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in range(num_groups):
        x = tl.load(x_place + group * BLOCK_K, mask=row_mask[:, None], other=0.0)
        weight = tl.load(weight_place + group * BLOCK_K, mask=column_mask[None, :], other=0.0)
        x_scale = tl.load(x_scales_ptr + row * num_groups + group, mask=row_mask, other=0.0)
        scale = x_scale * tl.load(weight_scale_place + group)
        total += tl.dot(x, weight) * scale[:, None]
    store_tile(out_ptr, total, bias_ptr, row, column, num_rows, num_outputs, HAS_BIAS)


class Fp8Product:
    """weight [out_features, in_features] float8_e4m3fn, scales float32. What the products share; a derived class
    multiplies quantized rows.

    On a GPU one or two rows take a skinny product, which quantizes them itself.
    """

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, form: Fp8Form) -> None:
        check_device(weight.device)
        self.shape = weight.shape
        self.form = form
        self.skinny = skinny_gemm_form(weight)
        self.input_form: InputForm = SkinnyFp8(self.skinny, form) if isinstance(self.skinny, SkinnyGemm) else form
        self.reference: Linear | None = None
        if weight.is_cpu:
            self.reference = Linear(self._dequantize(weight, scales), None if bias is None else bias.float())
        else:
            self.weight, self.scales, self.bias = weight, scales, bias

    def __call__(self, x: Activation) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features]"""
        if self._is_skinny(x):
            return skinny_fp8_linear(x, self.weight, self.scales, self.bias, self.form)
        assert not isinstance(x, UnnormedRows)
        rows = quantize(x, self.form)
        if self.reference is not None:
            return self.reference(dequantize_rows(rows)).to(rows.dtype)
        return self._multiply(rows)

    def gated(self, x: Activation, form: Fp8Form | None = None) -> torch.Tensor | QuantizedRows:
        """x [rows, in_features] -> silu(gate) * up, [rows, out_features / 2], of outputs [gate | up].

        Quantized to `form`, if that takes no launch of its own.
        """
        if self._is_skinny(x):
            return skinny_fp8_linear(x, self.weight, self.scales, self.bias, self.form, gated=True)
        return activate_as(self(x), "silu", form)

    def _is_skinny(self, x: Activation) -> TypeGuard[torch.Tensor | UnnormedRows]:
        return not isinstance(x, QuantizedRows) and isinstance(self.skinny.for_rows(x.shape[0]), SkinnyGemm)

    @staticmethod
    def _dequantize(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _multiply(self, rows: QuantizedRows) -> torch.Tensor:
        """The product on a GPU."""
        raise NotImplementedError


class Fp8Linear(Fp8Product):
    """scales [out_features]"""

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, form: Fp8Form) -> None:
        super().__init__(weight, scales.contiguous(), bias, form)
        # Numbers of rows for which cuBLAS has no product with scales by row: on Hopper, up to 256 rows by weights with
        # many inputs (https://github.com/pytorch/ao/issues/4582).
        self._refused: set[int] = set()
        if not weight.is_cpu and (weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE):
            raise ValueError(f"a matrix of {list(weight.shape)} on each rank cannot be multiplied in 8-bit floats")
        self.few_rows = None if weight.is_cpu else FewRowsLinear(weight, self.scales, bias)

    def gated(self, x: Activation, form: Fp8Form | None = None) -> torch.Tensor | QuantizedRows:
        tiling = None if self.few_rows is None or self._is_skinny(x) else self.few_rows.tiling(x.shape[0])
        if tiling is None:
            return super().gated(x, form)
        assert not isinstance(x, UnnormedRows)
        assert self.few_rows is not None
        return self.few_rows(quantize(x, self.form), tiling, gated=True)

    @staticmethod
    def _dequantize(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return weight.float() * scales[:, None]

    def _multiply(self, rows: QuantizedRows) -> torch.Tensor:
        assert self.few_rows is not None
        tiling = self.few_rows.tiling(rows.shape[0])
        if tiling is not None:
            return self.few_rows(rows, tiling)
        if rows.dtype != torch.bfloat16:
            return self._in_float32(rows)
        if rows.shape[0] not in self._refused:
            try:
                return torch._scaled_mm(
                    rows.values,
                    self.weight.t(),
                    scale_a=rows.scales,
                    scale_b=self.scales[None, :],
                    bias=self.bias,
                    out_dtype=torch.bfloat16,
                    use_fast_accum=True,
                )
            except RuntimeError as error:
                if "CUBLAS_STATUS_NOT_SUPPORTED" not in str(error):
                    raise
                self._refused.add(rows.shape[0])
        return self._in_float32(rows)

    def _in_float32(self, rows: QuantizedRows) -> torch.Tensor:
        """By one scale, which cuBLAS has for every type and shape."""
        one = torch.ones((), device=rows.values.device)
        y = torch._scaled_mm(rows.values, self.weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
        y = y * rows.scales * self.scales
        return (y if self.bias is None else y + self.bias).to(rows.dtype)


class Fp8BlockLinear(Fp8Product):
    """scales [ceil(out_features / 128), in_features / 128]"""

    @staticmethod
    def _dequantize(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return dequantize_blocks(weight, scales)

    def _multiply(self, rows: QuantizedRows) -> torch.Tensor:
        return fp8_block_matmul(rows, self.weight, self.scales, self.bias)
