"""A `WeightSource` of tensors in memory that checks shapes and types as a checkpoint does."""

from collections.abc import Mapping

import torch

from proa_engine.layers.weights import Slice


class StoredWeights:
    device = torch.device("cpu")

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def take(
        self, name: str, shape: tuple[int, ...], part: Slice | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        tensor = self.tensors[name]
        assert tensor.shape == shape, f"{name}: {tensor.shape} is stored, {shape} taken"
        assert dtype is None or tensor.dtype == dtype or (tensor.is_floating_point() and dtype.is_floating_point)
        taken = tensor if part is None else tensor.narrow(part.dim, part.start, part.length)
        return taken.clone(memory_format=torch.contiguous_format).to(dtype or tensor.dtype)

    def leave(self, prefix: str) -> None:
        pass
