"""Matrix products by 4-bit weights: y = x @ weight.T + bias with weight = (q - zero) * scale, by groups of inputs.

On a GPU the Triton kernel unpacks the numbers in registers. On a CPU, the reference: a product by the dequantized
weight.
"""

from dataclasses import dataclass

import torch

from proa_engine.kernels.int4_matmul import PACKED, int4_matmul
from proa_engine.kernels.linear import Linear


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight:
    """A weight [outputs, inputs] of 4-bit numbers. AWQ and GPTQ checkpoints are repacked to this layout."""

    packed: torch.Tensor  # [inputs / 8, outputs] int32: eight neighbouring inputs, the first in the lowest bits
    scales: torch.Tensor  # [groups, outputs]
    zeros: torch.Tensor  # [groups, outputs] int8: 0 … 16
    groups: torch.Tensor | None  # [inputs] int32: the group of each input; None: equal runs of inputs


class Int4Linear:
    def __init__(self, weight: Int4Weight, bias: torch.Tensor | None) -> None:
        self.shape = torch.Size((weight.packed.shape[1], weight.packed.shape[0] * PACKED))
        self.reference = None
        if weight.packed.is_cpu:
            self.reference = Linear(dequantize_int4(weight), bias)
        else:
            self.packed, self.scales, self.zeros, self.groups = (
                weight.packed,
                weight.scales,
                weight.zeros,
                weight.groups,
            )
            self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, inputs] -> [rows, outputs]"""
        if self.reference is not None:
            return self.reference(x)
        return int4_matmul(x, self.packed, self.scales, self.zeros, self.groups, self.bias)


def dequantize_int4(weight: Int4Weight) -> torch.Tensor:
    """Return the weight [outputs, inputs] in the type of its scales."""
    shifts = torch.arange(0, 4 * PACKED, 4, dtype=torch.int32, device=weight.packed.device)
    q = ((weight.packed[:, None, :] >> shifts[None, :, None]) & 15).flatten(0, 1)
    num_inputs, num_groups = q.shape[0], weight.scales.shape[0]
    groups = weight.groups
    if groups is None:
        groups = torch.arange(num_inputs, device=q.device) // (num_inputs // num_groups)
    groups = groups.long()
    return ((q - weight.zeros[groups]).to(weight.scales.dtype) * weight.scales[groups]).t().contiguous()
