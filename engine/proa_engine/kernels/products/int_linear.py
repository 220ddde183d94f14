"""Matrix products by integer weights (`int_weights`): y = x @ weight.T + bias.

On a GPU a Triton kernel dequantizes the weights tile by tile, in registers, before each dot product. On a CPU, the
reference: a product by the dequantized weight.
"""

import torch
import triton.language as tl

from proa_engine.kernels.int_weights import IntWeight, PackedIntWeight, dequantize_int, int_tile, pack_int
from proa_engine.kernels.launch import begin, cdiv, kernel
from proa_engine.kernels.products.linear import Linear
from proa_engine.kernels.products.product_tile import rows_per_program, store_tile
from proa_engine.kernels.tilings import tilings_of


class IntLinear:
    def __init__(self, weight: IntWeight, bias: torch.Tensor | None) -> None:
        self.shape = weight.numbers.shape
        self.reference = None
        if weight.numbers.is_cpu:
            self.reference = Linear(dequantize_int(weight), bias)
        else:
            self.weight, self.bias = pack_int(weight), bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, inputs] -> [rows, outputs]"""
        if self.reference is not None:
            return self.reference(x)
        return int_matmul(x, self.weight, self.bias)


def int_matmul(x: torch.Tensor, weight: PackedIntWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x [rows, inputs] -> [rows, outputs] in x's type. GPU only."""
    x = weight.sorted_inputs(x)
    num_rows, num_outputs = x.shape[0], weight.words.shape[1]
    assert x.stride(1) == 1
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    block_m = rows_per_program(num_rows)
    tile = tilings_of(x.device).packed_ints[block_m]
    int_matmul_kernel[(cdiv(num_rows, block_m), cdiv(num_outputs, tile.outputs))](
        x,
        weight.words,
        weight.scales,
        bias,
        out,
        num_rows,
        num_outputs,
        weight.num_inputs,
        x.stride(0),
        BITS=weight.bits,
        GROUP=weight.group,
        HAS_BIAS=bias is not None,
        BLOCK_M=block_m,
        BLOCK_N=tile.outputs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


@kernel(do_not_specialize=["num_rows"])
def int_matmul_kernel(
    x_ptr,  # [num_rows, *]
    words_ptr,  # [blocks, num_outputs, 16]
    scales_ptr,  # [groups, num_outputs]
    bias_ptr,  # [num_outputs], or nothing
    out_ptr,  # [num_rows, num_outputs]
    num_rows,
    num_outputs,
    num_inputs,
    stride_x_row,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = int_tile(
        x_ptr,
        words_ptr,
        scales_ptr,
        row,
        row < num_rows,
        stride_x_row,
        tl.cast(0, tl.int64),
        column,
        column < num_outputs,
        num_outputs,
        num_inputs,
        BITS,
        GROUP,
        BLOCK_M,
        BLOCK_N,
    )
    store_tile(out_ptr, total, bias_ptr, row, column, num_rows, num_outputs, HAS_BIAS)
