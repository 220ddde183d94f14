"""Weights of unsigned integers of 4 or 8 bits: w = (number - zero) * scale, by groups of inputs. Their layout in a
GPU's memory, and the part of a product that all kernels share.

An int32 holds pairs of neighbouring inputs 16 bits apart, which are dequantized together: or-ed into the mantissa of a
float16 or bfloat16 whose last bit counts 1, they are that number (1024 or 128) plus theirs. 8 bits are too many for
bfloat16's mantissa, and go through float32, as do scales and zeros of float32, whatever the model's type. The
difference to a whole zero is exact, and the weight is rounded once to the model's type, as by the reference.

A program computes a tile of the transposed output, as in `fp4`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

WORDS = 16  # int32 of one output in a block of inputs
SLICE = 2 * WORDS  # inputs of a block that are multiplied together
SMALLEST_GROUP = SLICE


@dataclass(frozen=True, slots=True, eq=False)
class IntWeight:
    """A matrix as a checkpoint has it, or matrices stacked in front."""

    numbers: torch.Tensor  # [outputs, inputs] uint8
    scales: torch.Tensor  # [outputs, groups]
    zeros: torch.Tensor  # [outputs, groups], in the type of the scales: whole numbers; in float32 maybe fractions
    bits: int  # 4 or 8
    groups: torch.Tensor | None = None  # [inputs] int32: the group of each input; None: equal runs of inputs
    is_part: bool = False  # where `groups` is set: these are some of the inputs of each group


@dataclass(frozen=True, eq=False)  # without slots: `parameters()` of a model finds tensors by `vars`
class PackedIntWeight:
    """A matrix as the kernels read it, or matrices stacked in front; the inputs are padded to blocks of
    512 / `bits`."""

    words: torch.Tensor  # [blocks, outputs, 16] int32; see `pack_int`
    scales: torch.Tensor  # [groups, outputs]: scale and zero, floats of the model's type or float32, in int32 or int64
    bits: int
    num_inputs: int  # in the order of `order`
    group: int  # inputs that share a scale; 0: all
    order: torch.Tensor | None = None  # [num_inputs] int32: the input of x at each place; None: as they are

    def sorted_inputs(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, inputs] -> [rows, num_inputs]"""
        if self.order is None:
            return x
        if x.shape[1] < self.num_inputs:  # some places have none, which is the input after the last
            x = torch.nn.functional.pad(x, (0, 1))
        return x.index_select(1, self.order)


def merge_outputs(weights: Sequence[IntWeight]) -> IntWeight:
    """Concatenate matrices of one number of bits and groups by their outputs."""
    if len(weights) == 1:
        return weights[0]
    first = weights[0]
    assert all(each.bits == first.bits and each.groups is None for each in weights)
    parts = ((each.numbers, each.scales, each.zeros) for each in weights)
    numbers, scales, zeros = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return IntWeight(numbers, scales, zeros, first.bits)


def stack(weights: Sequence[IntWeight]) -> IntWeight:
    """Stack matrices of one shape."""
    parts = ((each.numbers, each.scales, each.zeros) for each in weights)
    numbers, scales, zeros = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    return IntWeight(numbers, scales, zeros, weights[0].bits)


def dequantize_int(weight: IntWeight) -> torch.Tensor:
    """Return the weight [outputs, inputs] in the type of its scales."""
    num_inputs, num_groups = weight.numbers.shape[-1], weight.scales.shape[-1]
    groups = weight.groups
    if groups is None:
        groups = torch.arange(num_inputs, device=weight.numbers.device) // (num_inputs // num_groups)
    scales, zeros = (each[..., groups.long()] for each in (weight.scales, weight.zeros))
    return (weight.numbers.to(scales.dtype) - zeros) * scales


def pack_int(weight: IntWeight) -> PackedIntWeight:
    """Repack for the kernels.

    Word j of a block holds inputs 2j of its slices of 32 inputs in the lower half, from the lowest bits on, and inputs
    2j + 1 in the upper half.
    """
    ordered, order = (weight, None) if weight.groups is None else _sort_groups(weight)
    bits, num_inputs, num_groups = ordered.bits, ordered.numbers.shape[-1], ordered.scales.shape[-1]
    slices = 16 // bits
    padded = torch.nn.functional.pad(ordered.numbers, (0, -num_inputs % (SLICE * slices)))
    pairs = padded.unflatten(-1, (-1, slices, WORDS, 2))
    words = torch.zeros_like(pairs[..., 0, :, 0], dtype=torch.int32)
    for number in range(slices):
        for half in range(2):
            words |= pairs[..., number, :, half].to(torch.int32) << (bits * number + 16 * half)
    both = torch.stack((ordered.scales, ordered.zeros), -1)
    return PackedIntWeight(
        words.transpose(-3, -2).contiguous(),
        both.view(torch.int64 if both.dtype == torch.float32 else torch.int32).squeeze(-1).mT.contiguous(),
        bits,
        num_inputs,
        group=0 if num_groups == 1 else num_inputs // num_groups,
        order=order,
    )


def _sort_groups(weight: IntWeight) -> tuple[IntWeight, torch.Tensor]:
    """Sort the inputs by group, and pad groups that a rank holds in part to multiples of 32 inputs.

    Returns the sorted matrix, whose groups are equal runs of inputs, and the input at each place, one more than all for
    padding.
    """
    assert weight.groups is not None
    num_inputs, num_groups = weight.numbers.shape[1], weight.scales.shape[1]
    groups, order = weight.groups.long(), torch.argsort(weight.groups, stable=True)
    scales, zeros = weight.scales, weight.zeros
    sizes = [num_inputs // num_groups] * num_groups
    if not groups.is_meta:
        sizes = groups.bincount(minlength=num_groups).tolist()
    if weight.is_part or len(set(sizes)) > 1:
        runs = [
            torch.nn.functional.pad(run, (0, -len(run) % SMALLEST_GROUP), value=num_inputs)
            for run in order.split(sizes)
            if len(run)
        ]
        order = torch.cat(runs)
        group_of_slice = groups[order[::SMALLEST_GROUP]]
        scales, zeros = scales[:, group_of_slice], zeros[:, group_of_slice]
    numbers = weight.numbers[:, order.clamp(max=num_inputs - 1)]
    return IntWeight(numbers, scales, zeros, weight.bits), order.to(torch.int32)


@triton.jit
def int_tile(
    x_ptr,  # [*, *]
    words_ptr,  # [matrices, blocks, num_outputs, 16]
    scales_ptr,  # [matrices, groups, num_outputs]
    row,  # [BLOCK_M] int64, of x
    row_mask,
    stride_x_row,
    matrix,  # int64
    column,  # [BLOCK_N], of the matrix's outputs, in any order
    column_mask,
    num_outputs,
    num_inputs,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,  # inputs that share a scale, a multiple of 32; 0: all
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """x @ weight.T of these rows and columns, [BLOCK_M, BLOCK_N] float32."""
    SLICES: tl.constexpr = 16 // BITS
    BLOCK_K: tl.constexpr = 32 * SLICES
    ONE_SCALE: tl.constexpr = GROUP % BLOCK_K == 0  # for all of a block
    inner = tl.arange(0, 32)
    blocks_k = tl.cdiv(num_inputs, BLOCK_K)
    num_groups = 1 if GROUP == 0 else num_inputs // GROUP
    x_place = x_ptr + row[:, None] * stride_x_row
    scales_place = scales_ptr + matrix * num_groups * num_outputs + column
    words_place = words_ptr + (matrix * blocks_k * num_outputs + column[:, None]) * 16 + tl.arange(0, 16)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, num_inputs, BLOCK_K):
        words = tl.load(words_place, mask=column_mask[:, None], other=0)
        if ONE_SCALE:
            group = 0 if GROUP == 0 else start // GROUP
            both = tl.load(scales_place + group * num_outputs, mask=column_mask, other=0)
        for number in tl.static_range(SLICES):
            index = start + 32 * number + inner
            x = tl.load(x_place + index[None, :], mask=row_mask[:, None] & (index < num_inputs)[None, :], other=0.0)
            if not ONE_SCALE:
                first = start + 32 * number
                both = tl.load(
                    scales_place + first // GROUP * num_outputs, mask=column_mask & (first < num_inputs), other=0
                )
            weight = dequantize(words, both, number, BITS, x.dtype)
            total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
        words_place += num_outputs * 16
    return tl.trans(total)


@triton.jit
def dequantize(
    words,  # [N, 16]
    both,  # [N]: scales and zeros
    NUMBER: tl.constexpr,  # of the slice
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The weights of a slice, [N, 32]"""
    LAST: tl.constexpr = (1 << BITS) - 1
    shifted = words >> BITS * NUMBER
    if both.dtype == tl.int64:  # 2^23, as below, would take the fraction of a zero
        scale = both.to(tl.int32).to(tl.float32, bitcast=True)
        zero = (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        first = (shifted & LAST).to(tl.float32)
        second = (shifted >> 16 & LAST).to(tl.float32)
    else:
        scale = both.to(tl.int16).to(DTYPE, bitcast=True)
        zero = (both >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        if tl.float16 == DTYPE or (tl.bfloat16 == DTYPE and BITS == 4):
            if tl.float16 == DTYPE:
                pairs = (shifted & (LAST * 0x10001)) | 0x64006400
                zero += 1024.0
            else:
                pairs = (shifted & (LAST * 0x10001)) | 0x43004300
                zero += 128.0
            first = pairs.to(tl.int16).to(DTYPE, bitcast=True)
            second = (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        else:
            first = ((shifted & LAST) | 0x4B000000).to(tl.float32, bitcast=True)  # 2^23 and the number
            second = ((shifted >> 16 & LAST) | 0x4B000000).to(tl.float32, bitcast=True)
            zero = zero.to(tl.float32) + 8388608.0
            scale = scale.to(tl.float32)
    numbers = tl.reshape(tl.join(first, second), (words.shape[0], 2 * words.shape[1]))
    return ((numbers - zero[:, None]) * scale[:, None]).to(DTYPE)
