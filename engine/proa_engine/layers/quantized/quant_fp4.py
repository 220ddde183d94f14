"""The `LinearMethod`s of 4-bit floats: mxfp4 as gpt-oss stores its experts, and any matrix in mxfp4 or nvfp4, as
compressed-tensors and ModelOpt store them.

Products dequantize the weights and multiply in the model's type: Hopper has no tensor cores of 4-bit floats. So inputs
are not quantized, and a checkpoint's scales for them are not used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from proa_engine.kernels.experts.moe import ExpertActivation, FusedExperts, LoopedExperts
from proa_engine.kernels.experts.moe_fp4 import Fp4Experts
from proa_engine.kernels.experts.moe_pairs import ExpertRange
from proa_engine.kernels.fp4 import LARGEST_EXPONENT, MXFP4_GROUP, NVFP4_GROUP, StoredFp4, pack_fp4
from proa_engine.kernels.products.fp4_linear import Fp4Linear
from proa_engine.layers.expert_refusals import no_stacked_experts
from proa_engine.layers.experts import Biases, take_biases, take_gate_up
from proa_engine.layers.linear import Unquantized
from proa_engine.layers.weights import Experts, LoadedLinear, Projection, Slice, StackedExperts


class Fp4Method:
    """What the methods of any matrix share. A derived class takes the tensors of one."""

    __slots__ = ()
    group: ClassVar[int]  # inputs that share a scale

    @property
    def width_unit(self) -> int:
        return self.group

    def load(self, projections: Sequence[Projection], bias: torch.Tensor | None) -> LoadedLinear:
        return LoadedLinear(Fp4Linear(self._take(projections), bias))

    def take_matrix(self, projection: Projection) -> torch.Tensor:
        return self._take([projection]).dequantize()

    def load_experts(
        self,
        gate_up: Sequence[Sequence[Projection]],
        down: Sequence[Projection],
        held: ExpertRange,
        activation: ExpertActivation,
    ) -> Experts:
        first = self._take([projection for pair in gate_up for projection in pair]).stacked(held.size)
        return _make_experts((first, self._take(down).stacked(held.size)), (None, None), activation, held)

    def load_stacked_experts(self, experts: StackedExperts, activation: ExpertActivation) -> Experts:
        raise no_stacked_experts(experts.weights.prefix)

    def _take(self, projections: Sequence[Projection]) -> StoredFp4:
        """This rank's parts of the matrices, concatenated."""
        stored = StoredFp4.concatenated(
            [self._take_one(projection, _Parts.of(projection, self.group)) for projection in projections]
        )
        return _checked(stored, projections[0].weights.prefix)

    def _take_one(self, projection: Projection, parts: "_Parts") -> StoredFp4:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Nvfp4(Fp4Method):
    """e2m1 with `weight_scale`, in e4m3, for each 16 inputs and a float of 32 bits for the matrix."""

    group = NVFP4_GROUP
    weight_name: str
    global_scale_name: str
    divides: bool  # by the global scale; False: it multiplies
    input_scale_name: str

    def _take_one(self, projection: Projection, parts: "_Parts") -> StoredFp4:
        weights = projection.weights
        scales = weights.take("weight_scale", parts.groups_shape, parts.groups, torch.float8_e4m3fn)
        scale = weights.take(self.global_scale_name, (1,), dtype=torch.float32)
        if weights.has(self.input_scale_name):
            weights.take(self.input_scale_name, (1,), dtype=torch.float32)  # not used
        factors = (1 / scale if self.divides else scale).expand(projection.local_shape[0])
        return StoredFp4(_take_codes(projection, self.weight_name, parts), scales, factors)


@dataclass(frozen=True, slots=True)
class Mxfp4Packed(Fp4Method):
    """e2m1 with `weight_scale`, an exponent, for each 32 inputs."""

    group = MXFP4_GROUP
    weight_name: str

    def _take_one(self, projection: Projection, parts: "_Parts") -> StoredFp4:
        scales = projection.weights.take("weight_scale", parts.groups_shape, parts.groups, torch.uint8)
        return StoredFp4(_take_codes(projection, self.weight_name, parts), scales)


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """The experts of gpt-oss. All other matrices are unquantized."""

    @property
    def width_unit(self) -> int:
        return MXFP4_GROUP

    def load(self, projections: Sequence[Projection], bias: torch.Tensor | None) -> LoadedLinear:
        return Unquantized().load(projections, bias)

    def take_matrix(self, projection: Projection) -> torch.Tensor:
        return Unquantized().take_matrix(projection)

    def load_experts(
        self,
        gate_up: Sequence[Sequence[Projection]],
        down: Sequence[Projection],
        held: ExpertRange,
        activation: ExpertActivation,
    ) -> Experts:
        raise NotImplementedError("experts have this format only in one tensor")

    def load_stacked_experts(self, experts: StackedExperts, activation: ExpertActivation) -> Experts:
        if experts.hidden_size % MXFP4_GROUP or experts.length % MXFP4_GROUP:
            raise ValueError(
                f"{experts.weights.prefix}: {experts.hidden_size} inputs and {experts.length} of the inner width on "
                f"each rank cannot be cut into groups of {MXFP4_GROUP}; a smaller tensor_parallel_size may help"
            )
        prefix = experts.weights.prefix
        stored = _checked(_take_gate_up(experts), prefix), _checked(_take_down(experts), prefix)
        return _make_experts(stored, take_biases(experts), activation, experts.held)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a rank needs of the tensors of a matrix."""

    codes_shape: tuple[int, int]  # of the whole tensors
    groups_shape: tuple[int, int]
    codes: Slice
    groups: Slice

    @classmethod
    def of(cls, projection: Projection, group: int) -> "_Parts":
        outputs, inputs, part = projection.out_features, projection.in_features, projection.part
        if inputs % group or (part.dim == 1 and (part.start % group or part.length % group)):
            raise ValueError(
                f"{projection.weights.prefix}: {projection.local_shape[1]} of {inputs} inputs on each rank cannot be "
                f"cut into groups of {group}; a smaller tensor_parallel_size may help"
            )

        def cut(size: int) -> Slice:
            """`part` of a tensor with an entry for `size` inputs."""
            return part if part.dim == 0 else Slice(1, part.start // size, part.length // size)

        return cls((outputs, inputs // 2), (outputs, inputs // group), cut(2), cut(group))


def _take_codes(projection: Projection, name: str, parts: _Parts) -> torch.Tensor:
    return projection.weights.take(name, parts.codes_shape, parts.codes, torch.uint8)


def _take_gate_up(experts: StackedExperts) -> StoredFp4:
    groups = experts.hidden_size // MXFP4_GROUP
    blocks = take_gate_up(experts, "gate_up_proj_blocks", after=(groups, MXFP4_GROUP // 2), dtype=torch.uint8)
    scales = take_gate_up(experts, "gate_up_proj_scales", after=(groups,), dtype=torch.uint8)
    return StoredFp4(blocks.flatten(-2), scales)


def _take_down(experts: StackedExperts) -> StoredFp4:
    shape = (experts.held.total, experts.hidden_size, experts.inner_size // MXFP4_GROUP)
    part = experts.inner_part(2, MXFP4_GROUP)
    take = experts.weights.take
    blocks = take("down_proj_blocks", (*shape, MXFP4_GROUP // 2), part, torch.uint8)
    return StoredFp4(blocks.flatten(-2), take("down_proj_scales", shape, part, torch.uint8))


def _checked(stored: StoredFp4, prefix: str) -> StoredFp4:
    """Raise ValueError for scales that the kernels cannot represent."""
    scales = stored.scales
    if scales.is_meta:
        return stored
    if scales.dtype == torch.uint8:
        if scales.max() > LARGEST_EXPONENT:
            raise ValueError(f"{prefix}: scales above 2^{LARGEST_EXPONENT - 127} are not supported")
    elif (scales.view(torch.uint8) & 127 == 127).any():
        raise ValueError(f"{prefix}: a scale is not a number (NaN)")
    return stored


def _make_experts(
    stored: tuple[StoredFp4, StoredFp4], biases: Biases, activation: ExpertActivation, held: ExpertRange
) -> Experts:
    """`stored`: gate and up, and down, of every expert of `held`."""
    if not stored[0].codes.is_cpu:
        gate_up, down = (Fp4Experts(pack_fp4(*each)) for each in zip(stored, biases, strict=True))
        return FusedExperts(gate_up, down, activation=activation, held=held)
    first, second = (
        [Fp4Linear(*one) for one in zip(each.unbind(), [None] * len(each.codes) if bias is None else bias, strict=True)]
        for each, bias in zip(stored, biases, strict=True)
    )
    return LoopedExperts(first, second, activation, held)
