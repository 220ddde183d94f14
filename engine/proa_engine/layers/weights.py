"""Weights: where layers take their parameters from while they are built. Knows neither files nor formats.

A layer asks for the full shape that it expects and the slice that its rank needs, so that a source can refuse a wrong
shape, read only the slice, and draw random weights that are the same for every number of ranks.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Slice:
    """`length` entries from `start` along dimension `dim` of the full tensor."""

    dim: int
    start: int
    length: int


class WeightSource(Protocol):
    """A checkpoint, or something that plays one."""

    def take(self, name: str, shape: tuple[int, ...], part: Slice | None = None) -> torch.Tensor:
        """Return `part` (default: all) of tensor `name`, whose full shape is `shape`, as a new contiguous tensor."""
        ...

    def __contains__(self, name: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Weights:
    """A view of a source under a name prefix, as a file system's folder: `weights / "mlp" / "up_proj"`."""

    source: WeightSource
    prefix: str = ""

    def __truediv__(self, name: str) -> "Weights":
        return Weights(self.source, f"{self.prefix}.{name}" if self.prefix else name)

    def take(self, name: str, shape: tuple[int, ...], part: Slice | None = None) -> torch.Tensor:
        return self.source.take((self / name).prefix, shape, part)

    def has(self, name: str) -> bool:
        return (self / name).prefix in self.source
