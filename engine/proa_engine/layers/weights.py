"""Weights: the interface through which layers take their parameters while they are built.

A layer asks for the full shape that it expects and the slice that its rank needs. So a source can reject a wrong shape,
read only the slice, and draw random weights that do not depend on the number of ranks. A `LinearMethod` defines how the
matrix of a linear layer is stored and multiplied.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from proa_engine.kernels.experts.moe import ExpertActivation
from proa_engine.kernels.experts.moe_pairs import ExpertRange
from proa_engine.kernels.fp8 import QuantizedRows
from proa_engine.kernels.products.skinny_gemm import PLAIN, InputForm


@dataclass(frozen=True, slots=True)
class Slice:
    """`length` entries from `start` along dimension `dim` of the full tensor."""

    dim: int
    start: int
    length: int


class WeightSource(Protocol):
    """Where tensors come from: a checkpoint, or random numbers."""

    device: torch.device  # of the tensors

    def take(
        self, name: str, shape: tuple[int, ...], part: Slice | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return `part` (default: all) of tensor `name`, whose full shape is `shape`, as a new contiguous tensor.

        `dtype` is the requested type (default: the model's). Floats may be converted to another width of floats; 8-bit
        floats and integers must be stored in that type.
        """
        ...

    def leave(self, prefix: str) -> None:
        """Leave the tensors under `prefix` to other ranks, or to none."""
        ...

    def __contains__(self, name: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Weights:
    """A view of a source under a name prefix; `/` appends to it: `weights / "mlp" / "up_proj"`.

    `names`: ends of names as layers have them, and as the checkpoint has them. The prefix is the checkpoint's.
    """

    source: WeightSource
    method: "LinearMethod"
    prefix: str = ""
    names: tuple[tuple[str, str], ...] = ()

    def __truediv__(self, name: str) -> "Weights":
        prefix = self.prefix
        for part in name.split("."):
            prefix = self._as_stored(f"{prefix}.{part}" if prefix else part)
        return replace(self, prefix=prefix)

    def _as_stored(self, name: str) -> str:
        for usual, stored in self.names:
            if name == usual or name.endswith(f".{usual}"):
                return name.removesuffix(usual) + stored
        return name

    def take(
        self, name: str, shape: tuple[int, ...], part: Slice | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self.source.take((self / name).prefix, shape, part, dtype)

    def leave(self) -> None:
        """Leave these weights to other ranks, or to none."""
        self.source.leave(self.prefix)

    def has(self, name: str) -> bool:
        return (self / name).prefix in self.source


@dataclass(frozen=True, slots=True)
class Projection:
    """One matrix [out_features, in_features] of a model, and the part of it that this rank holds."""

    weights: Weights
    out_features: int  # full sizes
    in_features: int
    part: Slice  # along dimension 0 (outputs) or 1 (inputs)

    @property
    def local_shape(self) -> tuple[int, int]:
        if self.part.dim == 0:
            return self.part.length, self.in_features
        return self.out_features, self.part.length


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """The matrices of all experts as two tensors: `gate_up_proj`, the rows of gate and up, and `down_proj`.

    A rank holds a share of the width of all experts, or some experts whole.
    """

    weights: Weights
    held: ExpertRange
    hidden_size: int
    inner_size: int  # full width of one expert
    start: int  # of this rank's share of the width
    length: int
    interleaved: bool  # rows of gate and up alternate; False: all of gate, then all of up
    inputs_first: bool  # unquantized matrices are [experts, inputs, outputs]; False: [experts, outputs, inputs]
    bias: bool  # `gate_up_proj_bias` and `down_proj_bias`

    @property
    def are_whole(self) -> bool:
        return self.length == self.inner_size

    def inner_part(self, dim: int, per: int = 1) -> Slice:
        """This rank's part of a tensor [experts, ...] whose dimension `dim` has an entry for `per` of the width."""
        if self.are_whole:
            return Slice(0, self.held.first, self.held.size)
        return Slice(dim, self.start // per, self.length // per)


@dataclass(frozen=True, slots=True)
class LoadedLinear:
    """A product by a loaded matrix."""

    product: Callable[..., torch.Tensor]  # [T, in_features], or its `input_form` -> [T, out_features]
    input_form: InputForm = PLAIN  # the form in which the product takes its input
    gated: Callable[..., torch.Tensor | QuantizedRows] | None = None  # as `GpuLinear.gated`, if it is fused


Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # arguments of `FusedExperts.__call__`


class LinearMethod(Protocol):
    """How the matrices of linear layers are stored and multiplied."""

    @property
    def width_unit(self) -> int:
        """The number of which each rank's share of an inner width must be a multiple, if it is cut."""
        ...

    def load(self, projections: Sequence[Projection], bias: torch.Tensor | None) -> LoadedLinear:
        """Load several projections of one input, sharded along the same dimension, as one product with concatenated
        outputs.

        Raises ValueError if the format cannot be sharded so.
        """
        ...

    def take_matrix(self, projection: Projection) -> torch.Tensor:
        """Take this rank's part of a matrix, dequantized: floats [outputs, inputs].

        Raises ValueError if the format cannot.
        """
        ...

    def load_experts(
        self,
        gate_up: Sequence[Sequence[Projection]],
        down: Sequence[Projection],
        held: ExpertRange,
        activation: ExpertActivation,
    ) -> Experts:
        """Load gate and up, or up alone, and down, of each expert of `held`. Raises ValueError if the format has no
        experts or cannot be sharded so."""
        ...

    def load_stacked_experts(self, experts: StackedExperts, activation: ExpertActivation) -> Experts:
        """Load experts that are stored together. Raises ValueError as `load_experts`."""
        ...
