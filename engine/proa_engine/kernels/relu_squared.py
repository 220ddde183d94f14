"""relu(x)², the activation of feed-forward layers without a gate (So et al. 2021, arXiv 2109.08668)."""

import torch


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """x [...] -> the same shape; may overwrite `x`."""
    return x.relu_().square_()


class ReluSquared:
    """An `ExpertActivation` of experts without a gate: x [rows, N] -> [rows, N]."""

    @property
    def constants(self) -> dict[str, object]:
        """As of `GatedActivation`."""
        return {"ACTIVATION": "relu_squared", "ALPHA": 0.0, "LIMIT": 0.0}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return relu_squared(x)
