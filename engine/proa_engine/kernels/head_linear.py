"""Products of each head by a matrix of its own."""

import torch

from proa_engine.kernels.linear import Linear


class HeadLinear:
    """y[t, h] = x[t, h] @ weight[h].T. On a CPU a token's bits do not depend on the batch."""

    def __init__(self, weight: torch.Tensor) -> None:
        """weight [heads, out_features, in_features]"""
        self.weight = weight
        self.products = [Linear(each) for each in weight.unbind()] if weight.is_cpu else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, heads, in_features] -> [T, heads, out_features]"""
        if self.products is None:
            return torch.bmm(x.transpose(0, 1), self.weight.transpose(1, 2)).transpose(0, 1)
        pairs = zip(self.products, x.unbind(1), strict=True)
        return torch.stack([product(rows.contiguous()) for product, rows in pairs], dim=1)
