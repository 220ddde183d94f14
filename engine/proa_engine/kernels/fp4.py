"""Matrices of 4-bit floats whose groups of inputs share a scale, and their product, which dequantizes in registers.

A weight is a number of e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) times its group's scale:

    mxfp4   a power of two for each 32 inputs
    nvfp4   a float of 8 bits (e4m3) for each 16 inputs, and one of 32 bits for the whole matrix

The number's bits, as sign, lowest two exponent bits and highest mantissa bit of a bfloat16, are the number times
2^-126, zero and 0.5 included, so one multiplication dequantizes. The factor of that multiplication is kept in range by
2^-64 (mxfp4) or 2^-8 (nvfp4), which is undone in the sum. All of these are exact: for powers of two from 2^-61 to 2^65,
and for every number of e4m3. The sum, in float32, is multiplied by the float of 32 bits: one for each output, because
matrices are merged.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

BLOCK_K = 128  # inputs of a block
MXFP4_GROUP = 32
NVFP4_GROUP = 16
LARGEST_EXPONENT = 192  # of mxfp4, biased by 127
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_SMALLEST_EXPONENT = -21  # of a scale of nvfp4 as it is packed


@dataclass(frozen=True, slots=True, eq=False)
class StoredFp4:
    """Matrices as checkpoints store them; the dimensions before the outputs are any."""

    codes: torch.Tensor  # [..., outputs, inputs / 2] uint8: two inputs a byte, the first in the low bits
    scales: torch.Tensor  # [..., outputs, groups] uint8, exponents biased by 127: mxfp4; float8_e4m3fn: nvfp4
    factors: torch.Tensor | None = None  # [..., outputs] float32, of nvfp4

    @classmethod
    def concatenated(cls, matrices: "Sequence[StoredFp4]") -> "StoredFp4":
        """One matrix with the outputs of several [outputs, inputs]."""
        factors = [each.factors for each in matrices if each.factors is not None]
        return cls(
            torch.cat([each.codes for each in matrices]),
            torch.cat([each.scales for each in matrices]),
            torch.cat(factors) if factors else None,
        )

    def stacked(self, num_matrices: int = 1) -> "StoredFp4":
        """[matrices * outputs, inputs] -> [matrices, outputs, inputs]"""
        shape = (num_matrices, -1)
        factors = None if self.factors is None else self.factors.unflatten(0, shape)
        return StoredFp4(self.codes.unflatten(0, shape), self.scales.unflatten(0, shape), factors)

    def unbind(self) -> "list[StoredFp4]":
        """Each matrix of [matrices, outputs, inputs]."""
        factors = [None] * len(self.codes) if self.factors is None else self.factors
        return [StoredFp4(*each) for each in zip(self.codes, self.scales, factors, strict=True)]

    def dequantize(self) -> torch.Tensor:
        """The weights [..., outputs, inputs] float32."""
        both = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(-2)
        values: torch.Tensor = torch.tensor(VALUES, device=self.codes.device)[both.long()]
        values = values.unflatten(-1, (self.scales.shape[-1], -1))
        if self.factors is None:
            return torch.ldexp(values, self.scales[..., None].int() - 127).flatten(-2)
        return (values * self.scales.float()[..., None]).flatten(-2) * self.factors[..., None]


@dataclass(frozen=True, eq=False)  # without slots, as `ExpertMatrices`
class Fp4Matrices:
    """Matrices as kernels read them; the inputs are padded with zeros to blocks of 128.

    Word j of a block holds inputs 2j of its four runs of 32 inputs in the upper half, from the lowest bits on, and
    inputs 2j + 1 in the lower half: the two of a run are 16 bits apart, and are dequantized together.

    The scales of a block's groups are bytes, the first lowest: exponents biased by 127 (mxfp4), or 5 bits of exponent,
    where 0 is 2^-21, and 3 of mantissa (nvfp4). Behind those of nvfp4 lie the bits of each output's float of 32 bits,
    times 2^8.
    """

    words: torch.Tensor  # [matrices, blocks, outputs, 16] int32
    scales: torch.Tensor  # [matrices, blocks, outputs] int32: mxfp4; [matrices, blocks + 1, outputs] int64: nvfp4
    num_inputs: int
    bias: torch.Tensor | None = None  # [matrices, outputs]

    @property
    def num_outputs(self) -> int:
        return self.words.shape[2]


def pack_fp4(stored: StoredFp4, bias: torch.Tensor | None = None) -> Fp4Matrices:
    """Repack matrices [matrices, outputs, inputs] with a bias [matrices, outputs]."""
    codes, scales, per_block, word = stored.codes, stored.scales, BLOCK_K // MXFP4_GROUP, torch.int32
    if stored.factors is not None:
        codes, scales = _positive_scales(codes, scales)
        per_block, word = BLOCK_K // NVFP4_GROUP, torch.int64
    num_inputs = 2 * codes.shape[2]
    codes = F.pad(codes, (0, -codes.shape[2] % (BLOCK_K // 2))).unflatten(2, (-1, 4, 16))
    words = torch.zeros_like(codes[:, :, :, 0], dtype=torch.int32)
    for run in range(4):
        pairs = codes[:, :, :, run].to(torch.int32)
        words |= (pairs >> 4) << (4 * run)
        words |= (pairs & 15) << (4 * run + 16)
    scales = F.pad(scales, (0, -scales.shape[2] % per_block)).unflatten(2, (-1, per_block))
    packed = torch.zeros_like(scales[..., 0], dtype=word)
    for group in range(per_block):
        packed |= scales[..., group].to(word) << (8 * group)
    packed = packed.transpose(1, 2)
    if stored.factors is not None:
        bits = (stored.factors * 256).view(torch.int32).to(word)
        packed = torch.cat((packed, bits[:, None]), 1)
    return Fp4Matrices(words.transpose(1, 2).contiguous(), packed.contiguous(), num_inputs, bias)


def _positive_scales(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the signs of scales and their zeros to the numbers. Returns the codes, and the scales as bytes."""
    numbers = scales.bfloat16()
    spread = numbers.repeat_interleave(NVFP4_GROUP // 2, -1)
    codes = torch.where(spread < 0, codes ^ 0x88, codes).masked_fill(spread == 0, 0)
    # A bfloat16's exponent and highest three bits of mantissa, which are all that are set.
    bits = (numbers.abs().view(torch.int16) >> 4) - ((127 + _SMALLEST_EXPONENT) << 3)
    return codes, bits.clamp(min=0).to(torch.uint8)


@triton.jit
def _dequantize(words, scales, G: tl.constexpr, DTYPE: tl.constexpr):
    """words [N, 16], scales [N] -> the weights of run G of 32 inputs, [N, 32], times 2^-64 (mxfp4) or 2^-8 (nvfp4).

    Those of mxfp4 in float16, whose range is too small, without that factor.
    """
    signs = (words << (12 - 4 * G)) & -0x7FFF8000  # bits 31 and 15
    if G == 3:
        rest = words >> 6
    elif G == 2:
        rest = words >> 2
    else:
        rest = words << (6 - 4 * G)
    pairs = signs | (rest & 0x01C001C0)
    if scales.dtype == tl.int64:
        low = scales << 4 if G == 0 else scales >> (16 * G - 4)
        high = scales >> (16 * G + 4)
        bits = tl.join(low, high).to(tl.int32) & 0xFF0 | 0x7000
    else:
        bits = (((scales >> (8 * G)) & 255) + 62) << 7
    if tl.bfloat16 == DTYPE:
        first = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        second = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
        factor = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        first = (pairs & -0x10000).to(tl.float32, bitcast=True)
        second = (pairs << 16).to(tl.float32, bitcast=True)
        factor = (bits << 16).to(tl.float32, bitcast=True)
    if scales.dtype == tl.int64:
        factor = tl.reshape(tl.broadcast_to(factor[:, :, None], (words.shape[0], 2, 16)), (words.shape[0], 32))
    else:
        factor = factor[:, None]
    weight = tl.reshape(tl.join(first, second), (words.shape[0], 2 * words.shape[1])) * factor
    if (scales.dtype == tl.int32) & (tl.float16 == DTYPE):
        weight *= 18446744073709551616.0  # 2^64
    return weight.to(DTYPE)


@triton.jit
def fp4_tile(
    x_ptr,  # [*, num_inputs]
    words_ptr,  # [matrices, ceil(num_inputs / 128), num_outputs, 16]
    scales_ptr,  # as in `Fp4Matrices`
    row,  # [BLOCK_M] int64, of x
    row_mask,
    stride_x_row,
    matrix,
    column,  # [BLOCK_N], of the matrix's outputs, in any order
    column_mask,
    num_outputs,
    num_inputs,
    begin,  # of the inputs, a multiple of 128
    end,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """x @ weight.T of these rows, columns and inputs, [BLOCK_M, BLOCK_N] float32.

    A program computes the transposed product, because Hopper's tensor cores take the left operand from registers.
    """
    HAS_FACTORS: tl.constexpr = scales_ptr.dtype.element_ty == tl.int64
    inner = tl.arange(0, 32)
    num_blocks = tl.cdiv(num_inputs, 128)
    first = begin // 128 * num_outputs
    x_place = x_ptr + row[:, None] * stride_x_row + begin + inner[None, :]
    scales_ptr += matrix * (num_blocks + HAS_FACTORS) * num_outputs
    scales_place = scales_ptr + first + column
    words_place = words_ptr + (matrix * num_blocks * num_outputs + first + column[:, None]) * 16
    words_place += tl.arange(0, 16)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(begin, end, 128):
        scales = tl.load(scales_place, mask=column_mask, other=0)
        words = tl.load(words_place, mask=column_mask[:, None], other=0)
        for run in tl.static_range(4):
            inner_mask = start + 32 * run + inner < num_inputs
            x = tl.load(x_place + 32 * run, mask=row_mask[:, None] & inner_mask[None, :], other=0.0)
            weight = _dequantize(words, scales, run, x.dtype)
            total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
        x_place += 128
        scales_place += num_outputs
        words_place += num_outputs * 16
    if HAS_FACTORS:
        factors = tl.load(scales_ptr + num_blocks * num_outputs + column, mask=column_mask, other=0)
        total *= factors.to(tl.int32).to(tl.float32, bitcast=True)[:, None]
    total = tl.trans(total)
    if not HAS_FACTORS and x_ptr.dtype.element_ty != tl.float16:
        total *= 18446744073709551616.0  # 2^64
    return total
