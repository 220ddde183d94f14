"""Optimizers: Muon for the matrices inside the blocks, AdamW for the embedding and the norms.

Muon (Keller Jordan, 2024, https://kellerjordan.github.io/posts/muon/) replaces a matrix's momentum by the nearest
orthogonal matrix.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

# Tuned for steps of 4096 tokens. At three times these rates the loss is noisy and copying is learned late.
_MUON_RATE, _ADAM_RATE = 0.007, 0.002
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


Optimizers = tuple[torch.optim.Optimizer, torch.optim.Optimizer]


class Muon(torch.optim.Optimizer):
    """Orthogonalized Nesterov momentum, for two-dimensional parameters only."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(list(parameters), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum: Tensor = state["momentum"]
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonal(parameter.grad.lerp(momentum, group["momentum"]))
                scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * scale)


def orthogonal(matrix: Tensor) -> Tensor:
    """Approximate the orthogonal factor of the matrix's polar decomposition with five Newton-Schulz steps."""
    a, b, c = _NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (torch.linalg.matrix_norm(x) + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.T if tall else x
    return result


def make_optimizers(network: nn.Module, blocks: nn.Module) -> Optimizers:
    """Muon for the matrices of `blocks`, a part of the network or all of it; AdamW for its other parameters."""
    matrices = [parameter for parameter in blocks.parameters() if parameter.dim() == 2]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in network.parameters() if id(parameter) not in chosen]
    adam = torch.optim.AdamW(others, lr=_ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    return Muon(matrices, lr=_MUON_RATE, momentum=0.95, weight_decay=0.02), adam


def set_rate(optimizers: Optimizers, fraction: float) -> None:
    """Set the learning rates to a fraction of their maximum."""
    for optimizer, rate in zip(optimizers, (_MUON_RATE, _ADAM_RATE), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate * fraction


def rate_fraction(step: int, steps: int) -> float:
    """Learning rate as a fraction of its maximum: 50 steps of warm-up, constant, linear decay over the last 40 %."""
    return min(1.0, (step + 1) / 50, max(0.0, (steps - step) / (0.4 * steps)))
