"""Products of one input by matrices that cannot be merged into one."""

from collections.abc import Callable, Sequence

import torch

from proa_engine.layers.weights import LinearMethod, LoadedLinear, Projection


class SideBySide:
    """Several products of one input; their outputs are concatenated."""

    def __init__(self, products: Sequence[Callable[..., torch.Tensor]]) -> None:
        self.products = list(products)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([product(x) for product in self.products], dim=-1)


def load_side_by_side(
    projections: Sequence[Projection], methods: Sequence[LinearMethod], bias: torch.Tensor | None
) -> LoadedLinear:
    """Load each projection by its own method, with its part of the concatenated `bias`."""
    sizes = [projection.local_shape[0] for projection in projections]
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    each = zip(projections, methods, biases, strict=True)
    return LoadedLinear(SideBySide([method.load([one], offset).product for one, method, offset in each]))
