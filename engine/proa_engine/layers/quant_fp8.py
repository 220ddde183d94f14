"""The `LinearMethod` of 8-bit floats (e4m3): matrices that are stored so, or are made so when they are loaded.

Knows what tensors stand for a matrix and how they are cut; the arithmetic is in kernels.fp8_linear.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from proa_engine.kernels.fp8 import FP8, Fp8Form, quantize
from proa_engine.kernels.fp8_block_matmul import BLOCK
from proa_engine.kernels.fp8_linear import Fp8BlockLinear, Fp8Linear
from proa_engine.layers.linear import take_weight
from proa_engine.layers.weights import LoadedLinear, Projection, Slice


class OnlineFp8:
    """Unquantized weights on disk; in memory 8 bits and a scale for each output."""

    def load(self, projections: Sequence[Projection], bias: torch.Tensor | None) -> LoadedLinear:
        weight = quantize(take_weight(projections), Fp8Form())
        form = Fp8Form()
        return LoadedLinear(Fp8Linear(weight.values, weight.scales.flatten(), bias, form), form)


@dataclass(frozen=True, slots=True)
class StoredFp8:
    """`weight` in 8 bits beside `weight_scale`, of the tensor or of each output.

    Scales of activations are those of the checkpoint (`input_scale`) if `static`, else of each token: finer than the
    one for a whole batch that some checkpoints ask for, and independent of who else is in it.
    """

    scale_of: Literal["tensor", "channel"]
    static: bool

    def load(self, projections: Sequence[Projection], bias: torch.Tensor | None) -> LoadedLinear:
        values = torch.cat([_take_values(projection) for projection in projections])
        scales = torch.cat([self._scales(projection) for projection in projections])
        form = Fp8Form(scale=_input_scale(projections) if self.static else None)
        return LoadedLinear(Fp8Linear(values, scales, bias, form), form)

    def _scales(self, projection: Projection) -> torch.Tensor:
        """[outputs of this rank] float32"""
        num_outputs, weights = projection.local_shape[0], projection.weights
        if self.scale_of == "tensor":
            return weights.take("weight_scale", (1,), dtype=torch.float32).expand(num_outputs)
        part = projection.part if projection.part.dim == 0 else None
        return weights.take("weight_scale", (projection.out_features, 1), part, torch.float32).flatten()


@dataclass(frozen=True, slots=True)
class BlockFp8:
    """`weight` in 8 bits beside a scale for each block of 128 x 128; activations have one for 128 inputs of a token."""

    scale_name: str  # "weight_scale_inv" of the Hugging Face format, which is no inverse, or "weight_scale"

    def load(self, projections: Sequence[Projection], bias: torch.Tensor | None) -> LoadedLinear:
        for projection in projections:
            _check_blocks(projection, is_last=projection is projections[-1])
        values = torch.cat([_take_values(projection) for projection in projections])
        scales = torch.cat([self._scales(projection) for projection in projections])
        form = Fp8Form(group=BLOCK)
        return LoadedLinear(Fp8BlockLinear(values, scales, bias, form), form)

    def _scales(self, projection: Projection) -> torch.Tensor:
        """[ceil(outputs / 128), inputs / 128] float32 of this rank"""
        part = projection.part
        shape = (-(-projection.out_features // BLOCK), projection.in_features // BLOCK)
        blocks = Slice(part.dim, part.start // BLOCK, -(-part.length // BLOCK))
        return projection.weights.take(self.scale_name, shape, blocks, torch.float32)


def _take_values(projection: Projection) -> torch.Tensor:
    shape = (projection.out_features, projection.in_features)
    return projection.weights.take("weight", shape, projection.part, FP8)


def _input_scale(projections: Sequence[Projection]) -> torch.Tensor:
    """Of the one input that they share: the largest, so that none overflows."""
    scales = [p.weights.take("input_scale", (1,), dtype=torch.float32) for p in projections]
    return torch.stack(scales).amax(0)


def _check_blocks(projection: Projection, *, is_last: bool) -> None:
    """Blocks must not cross what is cut or merged; only the outputs of the last matrix may end within one."""
    outputs, inputs = projection.local_shape
    whole = projection.part.dim == 1 or projection.part.length == projection.out_features
    if inputs % BLOCK or (outputs % BLOCK and not (is_last and whole)):
        raise ValueError(
            f"{projection.weights.prefix}: {outputs} x {inputs} on each rank cannot be cut into blocks of "
            f"{BLOCK} x {BLOCK}; a smaller tensor_parallel_size may help"
        )
