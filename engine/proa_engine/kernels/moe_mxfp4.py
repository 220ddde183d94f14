"""One product for all experts by weights of 4-bit floats in groups of 32 inputs (mxfp4), dequantized in registers.

A weight is a number of e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) times its group's power of two. Its bits,
as sign, lowest two exponent bits and highest mantissa bit of a bfloat16, are the number times 2^-126, zero and 0.5
included, so one multiplication dequantizes. That factor is kept in range by 2^-64, which the sum's factor of 2^64
undoes; all of these are exact for groups' exponents from -61 to 65.

A program computes a tile [BLOCK_N, BLOCK_M] of the transposed output: Hopper's tensor cores take the left operand from
registers.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from proa_engine.kernels.fp8 import QuantizedRows
from proa_engine.kernels.gpu_linear import store_tile
from proa_engine.kernels.launch import begin, cdiv, kernel
from proa_engine.kernels.moe_few import ExpertWeights
from proa_engine.kernels.moe_pairs import ExpertBlocks

GROUP = 32  # inputs that share an exponent
BLOCK_GROUPS = 4  # groups in a block of inputs
BLOCK_K = GROUP * BLOCK_GROUPS
WORDS = BLOCK_K // 8  # int32 of a block's row
LARGEST_EXPONENT = 192  # biased by 127
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, eq=False)  # without slots, as `ExpertMatrices`
class Mxfp4Matrices:
    """One matrix of every expert; the inputs are padded with zeros to blocks of 128."""

    words: torch.Tensor  # [experts, blocks, outputs, 16] int32; see `pack_mxfp4`
    exponents: torch.Tensor  # [experts, blocks, outputs] int32: those of a block's four groups, the first lowest
    num_inputs: int
    bias: torch.Tensor | None = None  # [experts, outputs]

    @property
    def num_experts(self) -> int:
        return self.words.shape[0]

    @property
    def for_few(self) -> ExpertWeights:
        return ExpertWeights("mxfp4", self.words, self.exponents, self.bias, self.words.shape[2], self.num_inputs)

    def multiply(
        self, x: torch.Tensor | QuantizedRows, blocks: ExpertBlocks, pair_weights: torch.Tensor | None, k: int
    ) -> torch.Tensor:
        """As `ExpertMatrices.multiply`."""
        assert isinstance(x, torch.Tensor)
        return moe_mxfp4_matmul(x, self, blocks, pair_weights, k)


def pack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None) -> Mxfp4Matrices:
    """Repack a checkpoint's tensors, all uint8: blocks [experts, outputs, groups, 16], two inputs a byte, the first in
    the low bits, and scales [experts, outputs, groups], exponents biased by 127.

    Word j of a block holds inputs 2j of its four groups in the upper half, from the lowest bits on, and inputs 2j + 1
    in the lower half: the two of a group are 16 bits apart, and are dequantized together.
    """
    missing = -scales.shape[2] % BLOCK_GROUPS
    blocks = torch.nn.functional.pad(blocks, (0, 0, 0, missing)).unflatten(2, (-1, BLOCK_GROUPS))
    scales = torch.nn.functional.pad(scales, (0, missing)).unflatten(2, (-1, BLOCK_GROUPS))
    words = torch.zeros_like(blocks[:, :, :, 0], dtype=torch.int32)
    exponents = torch.zeros_like(scales[..., 0], dtype=torch.int32)
    for group in range(BLOCK_GROUPS):
        pairs = blocks[:, :, :, group].to(torch.int32)
        words |= (pairs >> 4) << (4 * group)
        words |= (pairs & 15) << (4 * group + 16)
        exponents |= scales[..., group].to(torch.int32) << (8 * group)
    num_inputs = GROUP * (scales.shape[2] * BLOCK_GROUPS - missing)
    return Mxfp4Matrices(words.transpose(1, 2).contiguous(), exponents.transpose(1, 2).contiguous(), num_inputs, bias)


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Blocks [..., groups, 16] and scales [..., groups], as in `pack_mxfp4` -> the weights [..., inputs] float32"""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()
    values = torch.tensor(VALUES, device=blocks.device)[codes]
    return torch.ldexp(values, scales[..., None].int() - 127).flatten(-2)


def moe_mxfp4_matmul(
    x: torch.Tensor, matrices: Mxfp4Matrices, blocks: ExpertBlocks, pair_weights: torch.Tensor | None, k: int
) -> torch.Tensor:
    """See `ExpertMatrices.multiply`."""
    assert x.is_contiguous()
    assert x.shape[1] == matrices.num_inputs
    num_outputs = matrices.words.shape[2]
    by_pair = pair_weights is not None
    num_pairs = x.shape[0] * (1 if by_pair else k)
    out = torch.empty((num_pairs, num_outputs), dtype=x.dtype, device=x.device)
    block_m = blocks.block_size
    block_n = 64 if block_m <= 16 else 128
    moe_mxfp4_matmul_kernel[(blocks.max_blocks * cdiv(num_outputs, block_n),)](
        x,
        matrices.words,
        matrices.exponents,
        matrices.bias,
        out,
        pair_weights,
        blocks.pairs,
        blocks.experts,
        blocks.num_blocks,
        num_pairs,
        num_outputs,
        matrices.num_inputs,
        ROWS_PER_INPUT=1 if by_pair else k,
        HAS_BIAS=matrices.bias is not None,
        WEIGHTED=by_pair,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=8 if block_m == 128 else 4,
        num_stages=3 if block_m == 128 else 4,
    )
    return out


@triton.jit
def _dequantize(words, exponents, G: tl.constexpr, DTYPE: tl.constexpr):
    """words [N, 16], exponents [N] -> the weights of group G times 2^-64, [N, 32]. In float16, whose range is too
    small, without that factor."""
    signs = (words << (12 - 4 * G)) & -0x7FFF8000  # bits 31 and 15
    if G == 3:
        rest = words >> 6
    elif G == 2:
        rest = words >> 2
    else:
        rest = words << (6 - 4 * G)
    pairs = signs | (rest & 0x01C001C0)
    exponent = (exponents >> (8 * G)) & 255
    if tl.bfloat16 == DTYPE:
        first = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        second = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
        factor = ((exponent + 62) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        first = (pairs & -0x10000).to(tl.float32, bitcast=True)
        second = (pairs << 16).to(tl.float32, bitcast=True)
        factor = ((exponent + 62) << 23).to(tl.float32, bitcast=True)
    weight = tl.reshape(tl.join(first, second), (words.shape[0], 2 * words.shape[1])) * factor[:, None]
    if tl.float16 == DTYPE:
        weight *= 18446744073709551616.0  # 2^64
    return weight.to(DTYPE)


@triton.jit
def mxfp4_tile(
    x_ptr,  # [*, num_inputs]
    words_ptr,  # [experts, ceil(num_inputs / 128), num_outputs, 16]
    exponents_ptr,  # [experts, ceil(num_inputs / 128), num_outputs]
    row,  # [BLOCK_M] int64, of x
    row_mask,
    expert,  # int64
    column,  # [BLOCK_N], of the expert's outputs, in any order
    column_mask,
    num_outputs,
    num_inputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """x @ weight.T of these rows and columns, [BLOCK_M, BLOCK_N] float32."""
    inner = tl.arange(0, 32)
    blocks_k = tl.cdiv(num_inputs, 128)
    x_place = x_ptr + row[:, None] * num_inputs + inner[None, :]
    exponents_place = exponents_ptr + expert * blocks_k * num_outputs + column
    words_place = words_ptr + (expert * blocks_k * num_outputs + column[:, None]) * 16 + tl.arange(0, 16)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, num_inputs, 128):
        exponents = tl.load(exponents_place, mask=column_mask, other=0)
        words = tl.load(words_place, mask=column_mask[:, None], other=0)
        for group in tl.static_range(4):
            inner_mask = start + 32 * group + inner < num_inputs
            x = tl.load(x_place + 32 * group, mask=row_mask[:, None] & inner_mask[None, :], other=0.0)
            weight = _dequantize(words, exponents, group, x.dtype)
            total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
        x_place += 128
        exponents_place += num_outputs
        words_place += num_outputs * 16
    total = tl.trans(total)
    if x_ptr.dtype.element_ty != tl.float16:
        total *= 18446744073709551616.0  # 2^64
    return total


@kernel(do_not_specialize=["num_pairs"])
def moe_mxfp4_matmul_kernel(
    x_ptr,  # [num_pairs / ROWS_PER_INPUT, num_inputs]
    words_ptr,  # [experts, ceil(num_inputs / 128), num_outputs, 16]
    exponents_ptr,  # [experts, ceil(num_inputs / 128), num_outputs]
    bias_ptr,  # [experts, num_outputs], or nothing
    out_ptr,  # [num_pairs, num_outputs]
    pair_weights_ptr,  # [num_pairs], or nothing
    pairs_ptr,  # [max_blocks * BLOCK_M]
    block_experts_ptr,  # [max_blocks]
    num_blocks_ptr,  # [1]
    num_pairs,
    num_outputs,
    num_inputs,
    ROWS_PER_INPUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    tiles_n = tl.cdiv(num_outputs, BLOCK_N)
    block = tl.program_id(0) // tiles_n
    if block >= tl.load(num_blocks_ptr):  # the grid is an upper bound
        return
    tile_n = tl.program_id(0) % tiles_n
    expert = tl.load(block_experts_ptr + block).to(tl.int64)
    pair = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    total = mxfp4_tile(
        x_ptr,
        words_ptr,
        exponents_ptr,
        pair // ROWS_PER_INPUT,
        pair < num_pairs,
        expert,
        column,
        column < num_outputs,
        num_outputs,
        num_inputs,
        BLOCK_M,
        BLOCK_N,
    )
    if HAS_BIAS:
        bias_ptr += expert * num_outputs
    store_tile(out_ptr, total, bias_ptr, pair_weights_ptr, pair, column, num_pairs, num_outputs, HAS_BIAS, WEIGHTED)
