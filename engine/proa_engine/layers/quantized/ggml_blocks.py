"""GGUF's blocks of quantized numbers (llama.cpp's ggml), as the numbers and scales of groups.

A block has the numbers of 32 or 256 neighbouring inputs. Names end in 0 if a weight is a multiple of the scale, in 1 if
an offset is added, and in K for blocks of 256, whose groups' scales and offsets are multiples of two numbers of the
block, 6 bits each, or 8 bits in Q6_K.
"""

from dataclasses import dataclass

import torch

from proa_engine.layers.quantized.ggml_types import BLOCKS


@dataclass(frozen=True, slots=True)
class Groups:
    """w = (number - middle) * scale + offset. All but `middle` in blocks."""

    numbers: torch.Tensor  # [blocks, groups, inputs of a group] uint8
    scales: torch.Tensor  # [blocks, groups] float32
    middle: int = 0
    offsets: torch.Tensor | None = None  # [blocks, groups] float32


def dequantize(data: torch.Tensor, kind: str) -> torch.Tensor:
    """The values of blocks (uint8) in float32, in their order. `kind`: the name of the type, of `BLOCKS`."""
    groups = unpack(data, kind)
    values = (groups.numbers.float() - groups.middle) * groups.scales[..., None]
    if groups.offsets is not None:
        values += groups.offsets[..., None]
    return values.flatten()


def unpack(data: torch.Tensor, kind: str) -> Groups:
    """The numbers and scales of blocks (uint8). `kind`: the name of the type, of `BLOCKS`."""
    blocks = data.view(-1, BLOCKS[kind][1])
    if kind.endswith("_K"):
        return _unpack_q6(blocks) if kind == "Q6_K" else _unpack_k(blocks, five_bits=kind == "Q5_K")
    scales, rest = _halves(blocks[:, :2]), blocks[:, 2:]
    if kind == "Q8_0":
        return Groups((rest ^ 128)[:, None], scales, middle=128)  # signed numbers, so that 128 is added
    has_offsets, offsets = kind.endswith("_1"), None
    if has_offsets:
        offsets, rest = _halves(rest[:, :2]), rest[:, 2:]
    if kind.startswith("Q4"):
        numbers, middle = _nibbles(rest), 8
    else:
        numbers, middle = _nibbles(rest[:, 4:]) | _bits(rest[:, :4]) << 4, 16
    return Groups(numbers[:, None], scales, 0 if has_offsets else middle, offsets)


def _unpack_k(blocks: torch.Tensor, *, five_bits: bool) -> Groups:
    """Q4_K and Q5_K: 8 groups of 32."""
    unit, offset_unit = _halves(blocks[:, :2]), _halves(blocks[:, 2:4])
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    # Four scales and four offsets have 6 bits of the first 8 bytes, the others 4 bits of the rest and 2 of those.
    scales = torch.cat((first & 63, rest & 15 | (first >> 6) << 4), -1)
    offsets = torch.cat((second & 63, rest >> 4 | (second >> 6) << 4), -1)
    packed = blocks[:, 48:] if five_bits else blocks[:, 16:]
    pairs = packed.view(-1, 4, 32)
    numbers = torch.stack((pairs & 15, pairs >> 4), 2).flatten(1, 2)
    if five_bits:
        high = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None] & 1
        numbers = numbers | high << 4
    return Groups(numbers, unit * scales.float(), offsets=-(offset_unit * offsets.float()))


def _unpack_q6(blocks: torch.Tensor) -> Groups:
    """16 groups of 16."""
    low, high = blocks[:, :128].view(-1, 2, 64), blocks[:, 128:192].view(-1, 2, 32)
    low = torch.cat((low & 15, low >> 4), -1).view(-1, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    numbers = low | (high[:, :, None] >> shifts[:, None] & 3) << 4
    scales = _halves(blocks[:, 208:]) * blocks[:, 192:208].view(torch.int8).float()
    return Groups(numbers.reshape(-1, 16, 16), scales, middle=32)


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """[n, bytes] -> [n, 2 * bytes]: all lower halves, then all upper ones."""
    return torch.cat((data & 15, data >> 4), -1)


def _halves(data: torch.Tensor) -> torch.Tensor:
    """[n, 2] uint8 -> [n, 1] float32"""
    return data.contiguous().view(torch.float16).float()


def _bits(data: torch.Tensor) -> torch.Tensor:
    """[n, bytes] -> [n, 8 * bytes], from the lowest bits on."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return (data[..., None] >> shifts & 1).flatten(1)
