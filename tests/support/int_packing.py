"""Integers of 4 and 8 bits as AWQ, GPTQ and compressed-tensors lay them on disk: w = (q - zero) * scale.

Written from the formats' descriptions.

All pack eight, or four of 8 bits, in an int32. AWQ, which has 4 bits, packs neighbouring outputs, in the order
0 2 4 6 1 3 5 7 from the lowest bits on; GPTQ packs neighbouring inputs (and, of the zeros, outputs) in their order, and
stores each zero less one in version 1. Compressed-tensors ("pack-quantized") packs as GPTQ, with outputs first.
"""

from collections.abc import Sequence

import torch

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
Tensors = dict[str, torch.Tensor]


def awq_tensors(weight: torch.Tensor, group_size: int) -> tuple[Tensors, torch.Tensor]:
    """weight [out, in] -> the tensors of AWQ's "gemm" version, and the weight that they stand for."""
    scales, zeros, q = _quantize(weight.t(), group_size, sym=False, bits=4)
    tensors = {
        "qweight": _pack(q, AWQ_ORDER, 4),
        "qzeros": _pack(zeros, AWQ_ORDER, 4),
        "scales": scales,
    }
    return tensors, _dense(q, scales, zeros, torch.arange(weight.shape[1]) // group_size)


def gptq_tensors(
    weight: torch.Tensor, group_size: int, *, sym: bool, shuffled: bool = False, offset: int = 1, bits: int = 4
) -> tuple[Tensors, torch.Tensor]:
    """weight [out, in] -> GPTQ's tensors, and the weight that they stand for. `shuffled`: which inputs share a group
    follows an order of importance (`desc_act`), here a random one."""
    scales, zeros, q, g_idx = _quantize_in_order(weight, group_size, sym=sym, shuffled=shuffled, bits=bits)
    tensors = {
        "qweight": _pack(q.t().contiguous(), range(32 // bits), bits).t(),
        "qzeros": _pack((zeros - offset) & ((1 << bits) - 1), range(32 // bits), bits),
        "scales": scales,
        "g_idx": g_idx,
    }
    return tensors, _dense(q, scales, zeros, g_idx.long())


def pack_quantized_tensors(
    weight: torch.Tensor, group_size: int, *, sym: bool, shuffled: bool = False, bits: int = 4
) -> tuple[Tensors, torch.Tensor]:
    """weight [out, in] -> the tensors of "pack-quantized", and the weight that they stand for. `group_size` -1: one
    group. `shuffled`: as for GPTQ (`actorder` "group")."""
    scales, zeros, q, g_idx = _quantize_in_order(weight, group_size, sym=sym, shuffled=shuffled, bits=bits)
    tensors = {
        "weight_packed": _pack(q.t().contiguous(), range(32 // bits), bits),
        "weight_scale": scales.t(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not sym:
        tensors["weight_zero_point"] = _pack(zeros, range(32 // bits), bits).t()
    if shuffled:
        tensors["weight_g_idx"] = g_idx
    return tensors, _dense(q, scales, zeros, g_idx.long())


def _quantize_in_order(
    weight: torch.Tensor, group_size: int, *, sym: bool, shuffled: bool, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """weight [out, in] -> scales, zeros and numbers as of `_quantize`, and the group of each input [in] int32"""
    inputs = weight.shape[1]
    group_size = inputs if group_size == -1 else group_size
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(0)) if shuffled else torch.arange(inputs)
    scales, zeros, ordered = _quantize(weight.t()[order], group_size, sym=sym, bits=bits)
    g_idx = torch.empty(inputs, dtype=torch.int32)
    g_idx[order] = (torch.arange(inputs) // group_size).to(torch.int32)
    q = torch.empty_like(ordered)
    q[order] = ordered
    return scales, zeros, q, g_idx


def _quantize(
    weight: torch.Tensor, group_size: int, *, sym: bool, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """weight [in, out] -> scales float16 and zeros int32 [groups, out], numbers of 0 to `last` int32 [in, out]"""
    groups, last = weight.view(-1, group_size, weight.shape[1]), (1 << bits) - 1
    if sym:
        scales = (groups.abs().amax(1) / (last // 2)).half()
        zeros = torch.full(scales.shape, last // 2 + 1, dtype=torch.int32)
    else:
        low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
        scales = ((high - low) / last).half()
        zeros = (-low / scales.float()).round().clamp(1, last).to(torch.int32)  # version 1 cannot say 0
    q = (groups / scales.float()[:, None]).round().to(torch.int32) + zeros[:, None]
    return scales, zeros, q.clamp(0, last).view(weight.shape)


def _pack(numbers: torch.Tensor, order: Sequence[int], bits: int) -> torch.Tensor:
    """[rows, n] -> [rows, n * bits / 32] int32; `order[i]` is which of an int32's numbers has its bits from bits * i
    on."""
    words = numbers.view(numbers.shape[0], -1, len(order))[:, :, list(order)].long()
    packed = (words << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def _dense(q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """[out, in] float32"""
    return ((q - zeros[group]) * scales.float()[group]).t().contiguous()
