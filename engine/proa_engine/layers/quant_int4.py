"""The `LinearMethod`s of 4-bit weights: AWQ (Lin et al. 2023), GPTQ (Frantar et al. 2022) and compressed-tensors'
pack-quantized, repacked to one layout on load.

AWQ and GPTQ store `qweight` and `qzeros` (eight numbers in an int32) and `scales` [groups, outputs], inputs first. AWQ
packs neighbouring outputs, interleaved. GPTQ packs neighbouring inputs of the weight and neighbouring outputs of the
zeros. Pack-quantized packs as GPTQ, outputs first: `weight_packed`, `weight_scale` [outputs, groups] and, if
asymmetric, `weight_zero_point`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from proa_engine.kernels.int4 import PACKED, Int4Linear, Int4Weight
from proa_engine.kernels.moe import ExpertActivation
from proa_engine.kernels.moe_pairs import ExpertRange
from proa_engine.layers.side_by_side import load_side_by_side
from proa_engine.layers.weights import Experts, LoadedLinear, Projection, Slice, StackedExperts

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where of eight, from the lowest bits on, AWQ keeps outputs 0 to 7
SMALLEST_GROUP = 32  # the tile of the product


class Int4Method:
    """What the methods refuse."""

    __slots__ = ()
    name: ClassVar[str]

    def take_matrix(self, projection: Projection) -> torch.Tensor:
        raise ValueError(f"{projection.weights.prefix}: latent attention quantized by {self.name} is not supported")

    def load_experts(
        self, gate_up: Sequence[Sequence[Projection]], down: Sequence[Projection], held: ExpertRange
    ) -> Experts:
        raise ValueError(f"experts quantized by {self.name} are not supported; supported: 8-bit floats, or none")

    def load_stacked_experts(self, experts: StackedExperts, activation: ExpertActivation) -> Experts:
        return self.load_experts((), (), experts.held)


@dataclass(frozen=True, slots=True)
class Awq(Int4Method):
    name = "awq"
    group_size: int | None  # inputs; None: all

    @property
    def width_unit(self) -> int:
        return self.group_size or PACKED

    def load(self, projections: Sequence[Projection], bias: torch.Tensor | None) -> LoadedLinear:
        return _load([self._weight(projection) for projection in projections], bias)

    def _weight(self, projection: Projection) -> Int4Weight:
        weights, part = projection.weights, projection.part
        inputs, outputs = projection.in_features, projection.out_features
        groups = _Groups.of(projection, self.group_size)
        _check_packs(projection)
        packed = Slice(1, part.start // PACKED, part.length // PACKED) if part.dim == 0 else None
        by_output = Slice(1, part.start, part.length) if part.dim == 0 else None
        by_input = Slice(0, part.start, part.length) if part.dim == 1 else None
        q = weights.take("qweight", (inputs, outputs // PACKED), packed or by_input, torch.int32)
        zeros = weights.take("qzeros", (groups.total, outputs // PACKED), packed or groups.part, torch.int32)
        scales = weights.take("scales", (groups.total, outputs), by_output or groups.part)
        return Int4Weight(
            packed=_pack_inputs(_unpack_outputs(q, AWQ_PLACES)),
            scales=scales,
            zeros=_unpack_outputs(zeros, AWQ_PLACES).to(torch.int8),
            groups=None,
        )


@dataclass(frozen=True, slots=True)
class Gptq(Int4Method):
    name = "gptq"
    group_size: int | None  # inputs; None: all
    desc_act: bool  # inputs were quantized by importance, so the inputs of a group are not contiguous
    symmetric: bool  # every zero is 8, whatever is stored: writers disagree on the version
    zero_offset: int  # what is added to stored zeros: 1 in version 1, 0 in version 2

    @property
    def width_unit(self) -> int:
        return PACKED if self.desc_act or self.group_size is None else self.group_size

    def load(self, projections: Sequence[Projection], bias: torch.Tensor | None) -> LoadedLinear:
        if bias is None:
            for projection in projections:
                _pass_over_bias(projection)
        if self.desc_act and len(projections) > 1:  # each matrix has its own input order
            return load_side_by_side(projections, [self] * len(projections), bias)
        return _load([self._weight(projection) for projection in projections], bias)

    def _weight(self, projection: Projection) -> Int4Weight:
        weights, part = projection.weights, projection.part
        inputs, outputs = projection.in_features, projection.out_features
        groups = _Groups.of(projection, self.group_size, all_groups=self.desc_act)
        _check_packs(projection)
        by_output = Slice(1, part.start, part.length) if part.dim == 0 else None
        packed = Slice(1, part.start // PACKED, part.length // PACKED) if part.dim == 0 else None
        packed_inputs = Slice(0, part.start // PACKED, part.length // PACKED) if part.dim == 1 else None
        q = weights.take("qweight", (inputs // PACKED, outputs), by_output or packed_inputs, torch.int32)
        scales = weights.take("scales", (groups.total, outputs), by_output or groups.part)
        stored = weights.take("qzeros", (groups.total, outputs // PACKED), packed or groups.part, torch.int32)
        if self.symmetric:
            zeros = torch.full(scales.shape, 8, dtype=torch.int8, device=scales.device)
        else:
            zeros = (_unpack_outputs(stored, range(PACKED)) + self.zero_offset).to(torch.int8)
        order = None
        if self.desc_act or weights.has("g_idx"):
            by_input = Slice(0, part.start, part.length) if part.dim == 1 else None
            order = weights.take("g_idx", (inputs,), by_input, torch.int32)
        return Int4Weight(q, scales, zeros, order if self.desc_act else None)


@dataclass(frozen=True, slots=True)
class PackQuantized(Int4Method):
    name = "compressed-tensors"
    group_size: int | None  # inputs; None: all
    symmetric: bool  # no zeros are stored
    group_order: bool  # as `Gptq.desc_act`

    @property
    def width_unit(self) -> int:
        return PACKED if self.group_order or self.group_size is None else self.group_size

    def load(self, projections: Sequence[Projection], bias: torch.Tensor | None) -> LoadedLinear:
        if self.group_order and len(projections) > 1:  # as in `Gptq`
            return load_side_by_side(projections, [self] * len(projections), bias)
        return _load([self._weight(projection) for projection in projections], bias)

    def _weight(self, projection: Projection) -> Int4Weight:
        weights, part = projection.weights, projection.part
        inputs, outputs = projection.in_features, projection.out_features
        groups = _Groups.of(projection, self.group_size, all_groups=self.group_order)
        _check_packs(projection)
        packed = Slice(part.dim, part.start // PACKED, part.length // PACKED)
        of_groups = None if groups.part is None else Slice(1, groups.part.start, groups.part.length)
        rows = part if part.dim == 0 else None
        if weights.has("weight_shape"):
            weights.take("weight_shape", (2,), dtype=torch.int64)  # repeats what is known
        q = weights.take("weight_packed", (outputs, inputs // PACKED), rows or packed, torch.int32)
        scales = weights.take("weight_scale", (outputs, groups.total), rows or of_groups).t().contiguous()
        if self.symmetric:
            zeros = torch.full(scales.shape, 8, dtype=torch.int8, device=scales.device)
        else:
            shape, packed_rows = (outputs // PACKED, groups.total), packed if part.dim == 0 else None
            stored = weights.take("weight_zero_point", shape, packed_rows or of_groups, torch.int32)
            zeros = _unpack_outputs(stored.t(), range(PACKED)).to(torch.int8)
        order = None
        if self.group_order:
            by_input = Slice(0, part.start, part.length) if part.dim == 1 else None
            order = weights.take("weight_g_idx", (inputs,), by_input, torch.int32)
        return Int4Weight(q.t().contiguous(), scales, zeros, order)


@dataclass(frozen=True, slots=True)
class _Groups:
    total: int  # of the whole matrix
    part: Slice | None  # that a rank needs; None: all

    @classmethod
    def of(cls, projection: Projection, group_size: int | None, *, all_groups: bool = False) -> "_Groups":
        inputs, part = projection.in_features, projection.part
        size = group_size or inputs
        local = projection.local_shape[1]
        if size % SMALLEST_GROUP or inputs % size or (part.dim == 1 and local % size and not all_groups and group_size):
            raise ValueError(
                f"{projection.weights.prefix}: {local} inputs on each rank cannot be cut into groups of {size}; "
                f"supported: whole groups, of a multiple of {SMALLEST_GROUP} inputs"
            )
        total = inputs // size
        cut = part.dim == 1 and not all_groups and group_size is not None
        return cls(total, Slice(0, part.start // size, part.length // size) if cut else None)


def _load(weights: list[Int4Weight], bias: torch.Tensor | None) -> LoadedLinear:
    if len(weights) == 1:
        return LoadedLinear(Int4Linear(weights[0], bias))
    merged = Int4Weight(
        packed=torch.cat([weight.packed for weight in weights], dim=1),
        scales=torch.cat([weight.scales for weight in weights], dim=1),
        zeros=torch.cat([weight.zeros for weight in weights], dim=1),
        groups=None,
    )
    return LoadedLinear(Int4Linear(merged, bias))


def _pass_over_bias(projection: Projection) -> None:
    """Accept a stored bias of zeros, which some writers add to every matrix. Raises ValueError if it is not zero."""
    weights = projection.weights
    if not weights.has("bias"):
        return
    stored = weights.take("bias", (projection.out_features,))
    # Only rank 0 checks: it alone adds the bias, so the other ranks have none.
    if projection.part.start == 0 and bool(stored.any()):
        raise ValueError(f"{weights.prefix}.bias is not zero, but the model has no bias there")


def _check_packs(projection: Projection) -> None:
    outputs, inputs = projection.local_shape
    if outputs % PACKED or inputs % PACKED:
        raise ValueError(
            f"{projection.weights.prefix}: {outputs} x {inputs} on each rank cannot be cut into packs of {PACKED}"
        )


def _unpack_outputs(packed: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """[rows, n / 8] int32 -> [rows, n], 0 to 15. `places`: the position of each output in its group of eight."""
    shifts = torch.tensor([4 * place for place in places], dtype=torch.int32, device=packed.device)
    return ((packed[:, :, None] >> shifts) & 15).flatten(1)


def _pack_inputs(q: torch.Tensor) -> torch.Tensor:
    """[inputs, outputs], 0 to 15 -> [inputs / 8, outputs] int32"""
    eights = q.view(-1, PACKED, q.shape[1])
    packed = eights[:, 0].clone()
    for place in range(1, PACKED):
        packed |= eights[:, place] << (4 * place)
    return packed
