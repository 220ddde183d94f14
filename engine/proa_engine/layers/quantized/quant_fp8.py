"""The `LinearMethod`s of 8-bit floats (e4m3): matrices stored in them, or quantized when they are loaded.

Defines the tensors of a matrix and how they are sharded; the products are in `kernels.products.fp8_linear`.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from proa_engine.kernels.experts.moe import ExpertActivation
from proa_engine.kernels.experts.moe_pairs import ExpertRange
from proa_engine.kernels.fp8 import (
    BLOCK,
    FP8,
    Fp8Form,
    dequantize_blocks,
    quantize_blocks_reference,
    quantize_reference,
)
from proa_engine.kernels.products.fp8_linear import MULTIPLE, Fp8BlockLinear, Fp8Linear
from proa_engine.layers.expert_refusals import no_stacked_experts
from proa_engine.layers.experts import make_experts, take_biases, take_matrices
from proa_engine.layers.linear import Unquantized, take_weight
from proa_engine.layers.quantized.scaled_matrices import (
    Tensors,
    make_scaled_experts,
    take_input_scale,
    take_scales,
)
from proa_engine.layers.weights import Experts, LoadedLinear, Projection, Slice, StackedExperts

_log = logging.getLogger(__name__)


class Fp8Method:
    """What the methods share. A derived class takes the tensors of a matrix, and overrides how inputs are quantized."""

    __slots__ = ()

    @property
    def in_blocks(self) -> bool:
        """Whether scales are those of blocks; False: of outputs."""
        return False

    @property
    def width_unit(self) -> int:
        return BLOCK if self.in_blocks else MULTIPLE

    def load(self, projections: Sequence[Projection], bias: torch.Tensor | None) -> LoadedLinear:
        product = self._product(*self._tensors(projections), bias, self._form(projections))
        return LoadedLinear(product, product.input_form, product.gated)

    def load_experts(
        self,
        gate_up: Sequence[Sequence[Projection]],
        down: Sequence[Projection],
        held: ExpertRange,
        activation: ExpertActivation,
    ) -> Experts:
        forms = self._form([each for pair in gate_up for each in pair]), self._form(down)
        matrices = [self._tensors(pair) for pair in gate_up], [self._tensors([one]) for one in down]
        return make_scaled_experts(matrices, forms, self._product, held, activation)

    def load_stacked_experts(self, experts: StackedExperts, activation: ExpertActivation) -> Experts:
        raise no_stacked_experts(experts.weights.prefix)

    @property
    def _product(self) -> type[Fp8Linear] | type[Fp8BlockLinear]:
        return Fp8BlockLinear if self.in_blocks else Fp8Linear

    def _form(self, projections: Sequence[Projection]) -> Fp8Form:
        """How the input of `projections` is quantized."""
        return Fp8Form(group=BLOCK) if self.in_blocks else Fp8Form()

    def _tensors(self, projections: Sequence[Projection]) -> Tensors:
        """This rank's parts of the matrices, concatenated."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class OnlineFp8(Fp8Method):
    """Unquantized weights on disk; in memory 8-bit floats with one scale for each output, or for each 128 x 128 block.

    Blocks are counted from the beginning of this rank's part of merged matrices. Matrices of sizes that the products do
    not have stay unquantized, which is logged once for each name and size.
    """

    by_block: bool = False
    logged: set[str] = field(default_factory=set, compare=False)

    @property
    def in_blocks(self) -> bool:
        return self.by_block

    def load(self, projections: Sequence[Projection], bias: torch.Tensor | None) -> LoadedLinear:
        outputs, inputs = sum(each.local_shape[0] for each in projections), projections[0].local_shape[1]
        names = "+".join(each.weights.prefix.rpartition(".")[2] for each in projections)
        if self._fits(names, outputs, inputs):
            return Fp8Method.load(self, projections, bias)
        return Unquantized().load(projections, bias)

    def take_matrix(self, projection: Projection) -> torch.Tensor:
        return take_weight([projection])

    def load_experts(
        self,
        gate_up: Sequence[Sequence[Projection]],
        down: Sequence[Projection],
        held: ExpertRange,
        activation: ExpertActivation,
    ) -> Experts:
        shapes = [each.local_shape for each in (gate_up[0][0], down[0])]
        if all(self._fits("experts", *shape) for shape in shapes):
            return Fp8Method.load_experts(self, gate_up, down, held, activation)
        return Unquantized().load_experts(gate_up, down, held, activation)

    def load_stacked_experts(self, experts: StackedExperts, activation: ExpertActivation) -> Experts:
        """The unquantized matrices of one layer are in memory at a time."""
        matrices, biases = take_matrices(experts), take_biases(experts)
        if not all(self._fits("experts", *each.shape[1:]) for each in matrices):
            return make_experts(matrices, biases, activation, experts.held)
        first, second = ([self._quantize(one) for one in each] for each in matrices)
        form = self._form(())
        return make_scaled_experts((first, second), (form, form), self._product, experts.held, activation, biases)

    def _tensors(self, projections: Sequence[Projection]) -> Tensors:
        return self._quantize(take_weight(projections))

    def _quantize(self, weight: torch.Tensor) -> Tensors:
        if self.by_block:
            return quantize_blocks_reference(weight)
        rows = quantize_reference(weight, Fp8Form())
        return rows.values, rows.scales.flatten()

    def _fits(self, name: str, outputs: int, inputs: int) -> bool:
        multiple = 1 if self.by_block else MULTIPLE
        if outputs % multiple == 0 and inputs % self.width_unit == 0:
            return True
        line = (
            f"{name} stays unquantized: {outputs} outputs and {inputs} inputs on a rank are not multiples of "
            f"{multiple} and {self.width_unit}"
        )
        if line not in self.logged:
            self.logged.add(line)
            _log.info("%s", line)
        return False


@dataclass(frozen=True, slots=True)
class StoredFp8(Fp8Method):
    """`weight` as 8-bit floats with `weight_scale`, one for the tensor or one for each output.

    Activation scales are the checkpoint's (`input_scale`) if `static`, else one for each token: finer than the one for
    a whole batch that some checkpoints ask for, and independent of the other tokens. Experts have the largest static
    scale of those that a rank holds.
    """

    scale_of: Literal["tensor", "channel"]
    static: bool

    def take_matrix(self, projection: Projection) -> torch.Tensor:
        values, scales = self._tensors([projection])
        return values.float() * scales[:, None]

    def _form(self, projections: Sequence[Projection]) -> Fp8Form:
        return Fp8Form(scale=take_input_scale(projections) if self.static else None)

    def _tensors(self, projections: Sequence[Projection]) -> Tensors:
        return take_weight(projections, FP8), take_scales(projections, self.scale_of)


@dataclass(frozen=True, slots=True)
class BlockFp8(Fp8Method):
    """`weight` as 8-bit floats with one scale for each 128 x 128 block; activations have one for each 128 inputs of a
    token."""

    scale_name: str  # "weight_scale_inv" in Hugging Face's format (not an inverse), or "weight_scale"

    @property
    def in_blocks(self) -> bool:
        return True

    def take_matrix(self, projection: Projection) -> torch.Tensor:
        part, blocks = projection.part, _in_whole_blocks(projection)
        rows = dequantize_blocks(*self._tensors([replace(projection, part=blocks)]))
        return rows.narrow(part.dim, part.start - blocks.start, part.length)

    def _tensors(self, projections: Sequence[Projection]) -> Tensors:
        for projection in projections:
            _check_blocks(projection, is_last=projection is projections[-1])
        return take_weight(projections, FP8), torch.cat([self._scales(projection) for projection in projections])

    def _scales(self, projection: Projection) -> torch.Tensor:
        """[ceil(outputs / 128), inputs / 128] float32 of this rank"""
        part = projection.part
        shape = (-(-projection.out_features // BLOCK), projection.in_features // BLOCK)
        blocks = Slice(part.dim, part.start // BLOCK, -(-part.length // BLOCK))
        return projection.weights.take(self.scale_name, shape, blocks, torch.float32)


def _in_whole_blocks(projection: Projection) -> Slice:
    """The least range of whole blocks that has the projection's part. The last block may be shorter."""
    part = projection.part
    full = (projection.out_features, projection.in_features)[part.dim]
    start = part.start // BLOCK * BLOCK
    end = min(-(-(part.start + part.length) // BLOCK) * BLOCK, full)
    return Slice(part.dim, start, end - start)


def _check_blocks(projection: Projection, *, is_last: bool) -> None:
    """Require that no block crosses a shard or merge boundary; only the last matrix's outputs may end within a
    block."""
    part = projection.part
    outputs, inputs = projection.local_shape
    may_end_within = is_last and (part.dim == 1 or part.start + part.length == projection.out_features)
    if part.start % BLOCK or inputs % BLOCK or (outputs % BLOCK and not may_end_within):
        raise ValueError(
            f"{projection.weights.prefix}: {outputs} x {inputs} on each rank cannot be cut into blocks of "
            f"{BLOCK} x {BLOCK}; use a tensor_parallel_size that gives each rank whole blocks"
        )
