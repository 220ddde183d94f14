"""The `LinearMethod` of GGUF's blocks whose numbers stay integers on a GPU: 4 bits, or 8 for numbers of 5 and 8 bits.

Scales and zeros are float32, as are the scales of a block times the block's unit. A zero is the offset divided by the
scale, a fraction. On a CPU, which multiplies by floats, blocks are dequantized as they are taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from proa_engine.kernels.int_weights import SMALLEST_GROUP, IntWeight
from proa_engine.kernels.products.linear import Linear
from proa_engine.layers.linear import take_weight
from proa_engine.layers.quantized.ggml_blocks import unpack
from proa_engine.layers.quantized.ggml_types import BLOCKS, INTEGER_BITS
from proa_engine.layers.quantized.quant_int import IntMethod
from proa_engine.layers.weights import LoadedLinear, Projection, Slice

_LEAST_SCALE = 2.0**-100  # of groups without a scale, whose values are their offset


@dataclass(frozen=True, slots=True)
class Ggml(IntMethod):
    """`kind`: of `INTEGER_BITS`."""

    kind: str

    @property
    def width_unit(self) -> int:
        return SMALLEST_GROUP

    def load(self, projections: Sequence[Projection], bias: torch.Tensor | None) -> LoadedLinear:
        if projections[0].weights.source.device.type == "cpu":
            return LoadedLinear(Linear(take_weight(projections), bias))
        return IntMethod.load(self, projections, bias)

    def take_matrix(self, projection: Projection) -> torch.Tensor:
        return take_weight([projection])

    def expert_matrix(self, projections: Sequence[Projection]) -> torch.Tensor:
        return take_weight(projections)

    def _weight(self, projection: Projection) -> IntWeight:
        values, num_bytes = BLOCKS[self.kind]
        (rows, columns), part = projection.local_shape, projection.part
        shape = (projection.out_features, projection.in_features // values * num_bytes)
        is_cut = part.dim == 1 and bool(part.start % values or part.length % values)  # within blocks
        of_bytes = Slice(1, part.start // values * num_bytes, part.length // values * num_bytes)
        taken = part if part.dim == 0 else None if is_cut else of_bytes
        groups = unpack(projection.weights.take("weight", shape, taken, torch.uint8).flatten(), self.kind)
        numbers, scales = groups.numbers.reshape(rows, -1), groups.scales.reshape(rows, -1)
        zeros = torch.full_like(scales, groups.middle)
        if groups.offsets is not None:
            offsets = groups.offsets.reshape(rows, -1)
            scales = scales.masked_fill((scales == 0) & (offsets != 0), _LEAST_SCALE)
            zeros = torch.where(scales == 0, 0, -offsets / scales)
        if is_cut:
            numbers = numbers.narrow(1, part.start, columns)
            first, count = part.start // SMALLEST_GROUP, columns // SMALLEST_GROUP
            scales, zeros = scales.narrow(1, first, count), zeros.narrow(1, first, count)
        return IntWeight(numbers, scales, zeros, INTEGER_BITS[self.kind])
