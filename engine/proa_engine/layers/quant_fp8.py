"""The `LinearMethod`s of 8-bit floats (e4m3): matrices stored in them, or quantized when they are loaded.

Defines the tensors of a matrix and how they are sharded; the products are in `kernels.fp8_linear`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from proa_engine.kernels.fp8 import BLOCK, FP8, Fp8Form, dequantize_blocks, quantize_reference
from proa_engine.kernels.fp8_linear import MULTIPLE, Fp8BlockLinear, Fp8Linear
from proa_engine.kernels.moe import ExpertActivation, ExpertMatrices, FusedExperts, LoopedExperts
from proa_engine.kernels.moe_pairs import ExpertRange
from proa_engine.layers.linear import take_weight
from proa_engine.layers.weights import Experts, LoadedLinear, Projection, Slice, StackedExperts

Tensors = tuple[torch.Tensor, torch.Tensor]  # values and scales


class Fp8Method:
    """What the methods share. A derived class takes the tensors of a matrix, and overrides how inputs are quantized."""

    __slots__ = ()
    product: ClassVar[type[Fp8Linear] | type[Fp8BlockLinear]] = Fp8Linear

    @property
    def width_unit(self) -> int:
        return MULTIPLE

    def load(self, projections: Sequence[Projection], bias: torch.Tensor | None) -> LoadedLinear:
        form = self._form(projections)
        product = self.product(*self._tensors(projections), bias, form)
        return LoadedLinear(product, product.input_form, product.gated)

    def load_experts(
        self, gate_up: Sequence[Sequence[Projection]], down: Sequence[Projection], held: ExpertRange
    ) -> Experts:
        form = self._expert_form()
        matrices = [self._tensors(pair) for pair in gate_up], [self._tensors([one]) for one in down]
        if matrices[0][0][0].is_cpu:
            first, second = ([self.product(*tensors, None, form) for tensors in each] for each in matrices)
            return LoopedExperts(first, second, held=held)
        return FusedExperts(_stack(matrices[0]), _stack(matrices[1]), form, held=held)

    def load_stacked_experts(self, experts: StackedExperts, activation: ExpertActivation) -> Experts:
        raise ValueError(f"{experts.weights.prefix}: experts in one tensor of 8-bit floats are not supported")

    def _form(self, projections: Sequence[Projection]) -> Fp8Form:
        return self._expert_form()

    def _expert_form(self) -> Fp8Form:
        return Fp8Form()

    def _tensors(self, projections: Sequence[Projection]) -> Tensors:
        """This rank's parts of the matrices, concatenated."""
        raise NotImplementedError


class OnlineFp8(Fp8Method):
    """Unquantized weights on disk; in memory 8-bit floats with one scale for each output."""

    def take_matrix(self, projection: Projection) -> torch.Tensor:
        return take_weight([projection])

    def load_stacked_experts(self, experts: StackedExperts, activation: ExpertActivation) -> Experts:
        raise ValueError(f"{experts.weights.prefix}: experts in one tensor cannot be quantized to 8-bit floats")

    def _tensors(self, projections: Sequence[Projection]) -> Tensors:
        rows = quantize_reference(take_weight(projections), Fp8Form())
        return rows.values, rows.scales.flatten()


@dataclass(frozen=True, slots=True)
class StoredFp8(Fp8Method):
    """`weight` as 8-bit floats with `weight_scale`, one for the tensor or one for each output.

    Activation scales are the checkpoint's (`input_scale`) if `static`, else one for each token: finer than the one for
    a whole batch that some checkpoints ask for, and independent of the other tokens.
    """

    scale_of: Literal["tensor", "channel"]
    static: bool

    def take_matrix(self, projection: Projection) -> torch.Tensor:
        values, scales = self._tensors([projection])
        return values.float() * scales[:, None]

    def _form(self, projections: Sequence[Projection]) -> Fp8Form:
        return Fp8Form(scale=_input_scale(projections) if self.static else None)

    def _expert_form(self) -> Fp8Form:
        if self.static:
            raise ValueError("experts with static scales of activations are not supported; supported: dynamic ones")
        return Fp8Form()

    def _tensors(self, projections: Sequence[Projection]) -> Tensors:
        return _take_values(projections), torch.cat([self._scales(projection) for projection in projections])

    def _scales(self, projection: Projection) -> torch.Tensor:
        """[outputs of this rank] float32"""
        num_outputs, weights = projection.local_shape[0], projection.weights
        if self.scale_of == "tensor":
            return weights.take("weight_scale", (1,), dtype=torch.float32).expand(num_outputs)
        part = projection.part if projection.part.dim == 0 else None
        return weights.take("weight_scale", (projection.out_features, 1), part, torch.float32).flatten()


@dataclass(frozen=True, slots=True)
class BlockFp8(Fp8Method):
    """`weight` as 8-bit floats with one scale for each 128 x 128 block; activations have one for each 128 inputs of a
    token."""

    scale_name: str  # "weight_scale_inv" in Hugging Face's format (not an inverse), or "weight_scale"

    product = Fp8BlockLinear

    @property
    def width_unit(self) -> int:
        return BLOCK

    def take_matrix(self, projection: Projection) -> torch.Tensor:
        part, blocks = projection.part, _in_whole_blocks(projection)
        rows = dequantize_blocks(*self._tensors([replace(projection, part=blocks)]))
        return rows.narrow(part.dim, part.start - blocks.start, part.length)

    def _expert_form(self) -> Fp8Form:
        return Fp8Form(group=BLOCK)

    def _tensors(self, projections: Sequence[Projection]) -> Tensors:
        for projection in projections:
            _check_blocks(projection, is_last=projection is projections[-1])
        return _take_values(projections), torch.cat([self._scales(projection) for projection in projections])

    def _scales(self, projection: Projection) -> torch.Tensor:
        """[ceil(outputs / 128), inputs / 128] float32 of this rank"""
        part = projection.part
        shape = (-(-projection.out_features // BLOCK), projection.in_features // BLOCK)
        blocks = Slice(part.dim, part.start // BLOCK, -(-part.length // BLOCK))
        return projection.weights.take(self.scale_name, shape, blocks, torch.float32)


def _stack(tensors: list[Tensors]) -> ExpertMatrices:
    weights, scales = zip(*tensors, strict=True)
    return ExpertMatrices(torch.stack(weights), torch.stack(scales))


def _take_values(projections: Sequence[Projection]) -> torch.Tensor:
    parts = [p.weights.take("weight", (p.out_features, p.in_features), p.part, FP8) for p in projections]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _input_scale(projections: Sequence[Projection]) -> torch.Tensor:
    """The scale of the input that the projections share: the largest of theirs, so that none overflows."""
    scales = [p.weights.take("input_scale", (1,), dtype=torch.float32) for p in projections]
    return torch.stack(scales).amax(0)


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
