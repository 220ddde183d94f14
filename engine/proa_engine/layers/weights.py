"""Weights: where layers take their parameters from while they are built. Knows neither files nor formats.

A layer asks for the full shape that it expects and the slice that its rank needs, so that a source can refuse a wrong
shape, read only the slice, and draw random weights that are the same for every number of ranks. How the matrix of a
linear layer is stored and multiplied is the business of a `LinearMethod`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from proa_engine.kernels.activation import InputForm


@dataclass(frozen=True, slots=True)
class Slice:
    """`length` entries from `start` along dimension `dim` of the full tensor."""

    dim: int
    start: int
    length: int


class WeightSource(Protocol):
    """A checkpoint, or something that plays one."""

    def take(
        self, name: str, shape: tuple[int, ...], part: Slice | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return `part` (default: all) of tensor `name`, whose full shape is `shape`, as a new contiguous tensor.

        `dtype` is what it is wanted as: floats may be converted to another width of floats, but 8-bit floats and
        integers must be stored as such; default: the model's own type.
        """
        ...

    def __contains__(self, name: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Weights:
    """A view of a source under a name prefix, as a file system's folder: `weights / "mlp" / "up_proj"`."""

    source: WeightSource
    method: "LinearMethod"
    prefix: str = ""

    def __truediv__(self, name: str) -> "Weights":
        return Weights(self.source, self.method, f"{self.prefix}.{name}" if self.prefix else name)

    def take(
        self, name: str, shape: tuple[int, ...], part: Slice | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self.source.take((self / name).prefix, shape, part, dtype)

    def has(self, name: str) -> bool:
        return (self / name).prefix in self.source


@dataclass(frozen=True, slots=True)
class Projection:
    """One matrix [out_features, in_features] of a model, and the part of it that a rank holds."""

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
class LoadedLinear:
    """A product by a matrix that is loaded."""

    product: Callable[..., torch.Tensor]  # [T, in_features], or the same as `input_form` has it -> [T, out_features]
    input_form: InputForm | None = None  # set: what the product turns its input into, unless it comes so already
    gated: Callable[..., torch.Tensor] | None = None  # and silu(gate) * up of [gate | up], if in one


Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # as `FusedExperts` is called


class LinearMethod(Protocol):
    """How the matrices of linear layers are stored and multiplied."""

    def load(self, projections: Sequence[Projection], bias: torch.Tensor | None) -> LoadedLinear:
        """Several projections of one input, all cut along the same dimension, as one product: outputs side by side.

        Raises ValueError where the format cannot be cut so.
        """
        ...

    def load_experts(self, gate_up: Sequence[Sequence[Projection]], down: Sequence[Projection]) -> Experts:
        """Gate and up, and down, of each expert. Raises ValueError where the format cannot be cut so or has none."""
        ...
