"""The `LinearMethod`s of 4-bit and 8-bit weights whose inputs are not quantized: AWQ (Lin et al. 2023), GPTQ (Frantar
et al. 2022) and compressed-tensors' pack-quantized, repacked to one layout on load.

AWQ and GPTQ store `qweight` and `qzeros` (eight or four numbers in an int32) and `scales` [groups, outputs], inputs
first. AWQ packs neighbouring outputs, interleaved. GPTQ packs neighbouring inputs of the weight and neighbouring
outputs of the zeros. Pack-quantized packs as GPTQ, outputs first: `weight_packed`, `weight_scale` [outputs, groups]
and, if asymmetric, `weight_zero_point`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from proa_engine.kernels.experts.moe import ExpertActivation, FusedExperts, LoopedExperts
from proa_engine.kernels.experts.moe_int import pack_experts
from proa_engine.kernels.experts.moe_pairs import ExpertRange
from proa_engine.kernels.int_weights import SMALLEST_GROUP, IntWeight, dequantize_int, merge_outputs, stack
from proa_engine.kernels.products.int_linear import IntLinear
from proa_engine.kernels.products.linear import Linear
from proa_engine.layers.expert_refusals import no_stacked_experts
from proa_engine.layers.side_by_side import load_side_by_side
from proa_engine.layers.weights import Experts, LoadedLinear, Projection, Slice, StackedExperts

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where of eight, from the lowest bits on, AWQ keeps outputs 0 to 7


class IntMethod:
    """What the methods share. A derived class takes the tensors of a matrix."""

    __slots__ = ()

    @property
    def width_unit(self) -> int:
        raise NotImplementedError

    @property
    def in_groups_of_any_inputs(self) -> bool:
        """The group of each input is stored, so each matrix has its own order of inputs."""
        return False

    def load(self, projections: Sequence[Projection], bias: torch.Tensor | None) -> LoadedLinear:
        if self.in_groups_of_any_inputs and len(projections) > 1:
            return load_side_by_side(projections, [self] * len(projections), bias)
        return LoadedLinear(IntLinear(merge_outputs([self._weight(projection) for projection in projections]), bias))

    def take_matrix(self, projection: Projection) -> torch.Tensor:
        return dequantize_int(self._weight(projection))

    def load_experts(
        self,
        gate_up: Sequence[Sequence[Projection]],
        down: Sequence[Projection],
        held: ExpertRange,
        activation: ExpertActivation,
    ) -> Experts:
        return load_int_experts(gate_up, down, (self, self), held, activation)

    def expert_weight(self, projections: Sequence[Projection]) -> IntWeight:
        """Gate and up of an expert, or down. Not of `in_groups_of_any_inputs`."""
        assert not self.in_groups_of_any_inputs
        return merge_outputs([self._weight(projection) for projection in projections])

    def expert_matrix(self, projections: Sequence[Projection]) -> torch.Tensor:
        """`expert_weight`, dequantized."""
        return dequantize_int(self.expert_weight(projections))

    def load_stacked_experts(self, experts: StackedExperts, activation: ExpertActivation) -> Experts:
        raise no_stacked_experts(experts.weights.prefix)

    def _weight(self, projection: Projection) -> IntWeight:
        """This rank's part of a matrix."""
        raise NotImplementedError


def load_int_experts(
    gate_up: Sequence[Sequence[Projection]],
    down: Sequence[Projection],
    methods: tuple[IntMethod, IntMethod],
    held: ExpertRange,
    activation: ExpertActivation,
) -> Experts:
    """As `LinearMethod.load_experts`, with one method for gate and up, and one for down."""
    if down[0].weights.source.device.type == "cpu":
        matrices = [methods[0].expert_matrix(pair) for pair in gate_up]
        others = [methods[1].expert_matrix([projection]) for projection in down]
        return LoopedExperts(list(map(Linear, matrices)), list(map(Linear, others)), activation, held)
    first = [methods[0].expert_weight(pair) for pair in gate_up]
    second = [methods[1].expert_weight([projection]) for projection in down]
    return FusedExperts(pack_experts(stack(first)), pack_experts(stack(second)), activation=activation, held=held)


@dataclass(frozen=True, slots=True)
class Awq(IntMethod):
    """4 bits."""

    group_size: int | None  # inputs; None: all

    @property
    def width_unit(self) -> int:
        return self.group_size or _per_word(4)

    def _weight(self, projection: Projection) -> IntWeight:
        weights, part = projection.weights, projection.part
        inputs, outputs = projection.in_features, projection.out_features
        groups, packed = _Groups.of(projection, self.group_size), _packed(projection, 4)
        rows, packed_rows, columns = _along(part, 0, 1), _along(packed, 0, 1), _along(part, 1, 0)
        of_groups = groups.along(0)
        q = weights.take("qweight", (inputs, outputs // 8), packed_rows or columns, torch.int32)
        zeros = weights.take("qzeros", (groups.total, outputs // 8), packed_rows or of_groups, torch.int32)
        scales = weights.take("scales", (groups.total, outputs), rows or of_groups).t()
        return IntWeight(_interleaved(q).t(), scales, _interleaved(zeros).t().to(scales.dtype), bits=4)


@dataclass(frozen=True, slots=True)
class Gptq(IntMethod):
    bits: int
    group_size: int | None  # inputs; None: all
    desc_act: bool  # inputs were quantized by importance, so the inputs of a group are not contiguous
    symmetric: bool  # every zero is in the middle, whatever is stored: writers disagree on the version
    zero_offset: int  # what is added to stored zeros: 1 in version 1, 0 in version 2

    @property
    def in_groups_of_any_inputs(self) -> bool:
        return self.desc_act and self.group_size is not None

    @property
    def width_unit(self) -> int:
        return _width_unit(self.bits, self.group_size, any_inputs=self.in_groups_of_any_inputs)

    def load(self, projections: Sequence[Projection], bias: torch.Tensor | None) -> LoadedLinear:
        if bias is None:
            for projection in projections:
                _pass_over_bias(projection)
        return IntMethod.load(self, projections, bias)

    def expert_weight(self, projections: Sequence[Projection]) -> IntWeight:
        for projection in projections:
            _pass_over_bias(projection)
        return IntMethod.expert_weight(self, projections)

    def _weight(self, projection: Projection) -> IntWeight:
        weights, part, per_word = projection.weights, projection.part, _per_word(self.bits)
        inputs, outputs = projection.in_features, projection.out_features
        any_inputs = self.in_groups_of_any_inputs
        groups = _Groups.of(projection, self.group_size, all_groups=any_inputs)
        packed, of_groups = _packed(projection, self.bits), groups.along(0)
        rows, packed_rows, packed_columns = _along(part, 0, 1), _along(packed, 0, 1), _along(packed, 1, 0)
        q = weights.take("qweight", (inputs // per_word, outputs), rows or packed_columns, torch.int32)
        scales = weights.take("scales", (groups.total, outputs), rows or of_groups).t()
        stored = weights.take("qzeros", (groups.total, outputs // per_word), packed_rows or of_groups, torch.int32)
        if self.symmetric:
            zeros = torch.full_like(scales, 1 << (self.bits - 1))
        else:
            zeros = _unpack(stored, self.bits).t().to(scales.dtype) + self.zero_offset
        order = None
        if any_inputs or weights.has("g_idx"):
            order = weights.take("g_idx", (inputs,), _along(part, 1, 0), torch.int32)
        numbers = _unpack(q.t(), self.bits)
        is_part = projection.local_shape[1] < inputs
        return IntWeight(numbers, scales, zeros, self.bits, order if any_inputs else None, is_part)


@dataclass(frozen=True, slots=True)
class PackQuantized(IntMethod):
    bits: int
    group_size: int | None  # inputs; None: all
    symmetric: bool  # no zeros are stored
    group_order: bool  # as `Gptq.desc_act`

    @property
    def in_groups_of_any_inputs(self) -> bool:
        return self.group_order

    @property
    def width_unit(self) -> int:
        return _width_unit(self.bits, self.group_size, any_inputs=self.group_order)

    def _weight(self, projection: Projection) -> IntWeight:
        weights, part, per_word = projection.weights, projection.part, _per_word(self.bits)
        inputs, outputs = projection.in_features, projection.out_features
        groups = _Groups.of(projection, self.group_size, all_groups=self.group_order)
        packed, of_groups = _packed(projection, self.bits), groups.along(1)
        rows = _along(part, 0, 0)
        if weights.has("weight_shape"):
            weights.take("weight_shape", (2,), dtype=torch.int64)  # repeats what is known
        q = weights.take("weight_packed", (outputs, inputs // per_word), rows or packed, torch.int32)
        scales = weights.take("weight_scale", (outputs, groups.total), rows or of_groups)
        if self.symmetric:
            zeros = torch.full_like(scales, 1 << (self.bits - 1))
        else:
            shape = outputs // per_word, groups.total
            stored = weights.take("weight_zero_point", shape, _along(packed, 0, 0) or of_groups, torch.int32)
            zeros = _unpack(stored.t(), self.bits).t().to(scales.dtype)
        order = None
        if self.group_order:
            order = weights.take("weight_g_idx", (inputs,), _along(part, 1, 0), torch.int32)
        is_part = projection.local_shape[1] < inputs
        return IntWeight(_unpack(q, self.bits), scales, zeros, self.bits, order, is_part)


@dataclass(frozen=True, slots=True)
class _Groups:
    total: int  # of the whole matrix
    start: int  # of those that a rank needs
    length: int

    @classmethod
    def of(cls, projection: Projection, group_size: int | None, *, all_groups: bool = False) -> "_Groups":
        inputs, part = projection.in_features, projection.part
        if group_size is None:
            return cls(1, 0, 1)
        local = projection.local_shape[1]
        is_cut = part.dim == 1 and not all_groups
        if group_size % SMALLEST_GROUP or inputs % group_size or (is_cut and local % group_size):
            raise ValueError(
                f"{projection.weights.prefix}: {local} inputs on each rank cannot be cut into groups of {group_size}; "
                f"supported: whole groups, of a multiple of {SMALLEST_GROUP} inputs"
            )
        total = inputs // group_size
        return cls(total, part.start // group_size, local // group_size) if is_cut else cls(total, 0, total)

    def along(self, dim: int) -> Slice | None:
        return None if self.length == self.total else Slice(dim, self.start, self.length)


def _per_word(bits: int) -> int:
    """Numbers in an int32."""
    return 32 // bits


def _width_unit(bits: int, group_size: int | None, *, any_inputs: bool) -> int:
    return _per_word(bits) if any_inputs or group_size is None else group_size


def _along(part: Slice, dim: int, tensor_dim: int) -> Slice | None:
    """`part` in a tensor whose dimension `tensor_dim` is the matrix's `dim`; None: the tensor is whole."""
    return Slice(tensor_dim, part.start, part.length) if part.dim == dim else None


def _packed(projection: Projection, bits: int) -> Slice:
    """The projection's part in words. Raises ValueError if a word, of inputs or outputs, is on two ranks."""
    part, per_word = projection.part, _per_word(bits)
    outputs, inputs = projection.local_shape
    if outputs % per_word or inputs % per_word or part.start % per_word:
        raise ValueError(
            f"{projection.weights.prefix}: {outputs} x {inputs} on each rank cannot be cut into packs of {per_word}"
        )
    return Slice(part.dim, part.start // per_word, part.length // per_word)


def _pass_over_bias(projection: Projection) -> None:
    """Accept a stored bias of zeros, which some writers add to every matrix. Raises ValueError if it is not zero."""
    weights = projection.weights
    if not weights.has("bias"):
        return
    stored = weights.take("bias", (projection.out_features,))
    # Only rank 0 checks: it alone adds the bias, so the other ranks have none.
    if projection.part.start == 0 and bool(stored.any()):
        raise ValueError(f"{weights.prefix}.bias is not zero, but the model has no bias there")


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, n] int32 -> [rows, n * 32 / bits] uint8, from the lowest bits on."""
    octets: torch.Tensor = packed.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(1)


def _interleaved(packed: torch.Tensor) -> torch.Tensor:
    """[rows, n / 8] int32 -> [rows, n] uint8, in AWQ's order."""
    eights: torch.Tensor = _unpack(packed, 4).unflatten(1, (-1, 8))
    return eights[:, :, list(AWQ_PLACES)].flatten(1)
