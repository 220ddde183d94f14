"""Routers of mixtures of experts: the choice of experts by logits."""

import torch

from proa_engine.kernels.experts.moe_route import Routing, route, route_reference
from support.kernels.case import close, grid, holds, on_device, table
from support.quantized_cases import ROUTINGS


@holds(
    interpreted=grid(table("experts how", *ROUTINGS), tokens=[5]),
    gpu=table("experts how tokens", (128, Routing(8, normalize=True), 500)),
)
def routes(dtype: torch.dtype, device: str, experts: int, how: Routing, tokens: int) -> None:
    """Among equal experts any may be chosen, in any order; if all are equal, the first ones."""
    logits = torch.randn(tokens, experts).to(dtype)
    logits[2] = logits[2, 0]
    correction = correction_of(how, experts)
    weights, chosen = (each.cpu() for each in route(*on_device((logits, how, correction), device)))
    if correction is None:
        assert chosen[2].tolist() == list(range(how.num_chosen))
    expected = assert_chosen(chosen, logits, how, correction, 1e-5)
    rtol = 1.3e-6 if device == "cpu" else 1e-4
    torch.testing.assert_close(weights, expected, rtol=rtol, atol=1e-5)


def correction_of(how: Routing, experts: int) -> torch.Tensor | None:
    return torch.randn(experts) * 0.1 if how.scoring == "sigmoid" else None


def assert_chosen(
    chosen: torch.Tensor, logits: torch.Tensor, how: Routing, correction: torch.Tensor | None, tolerance: float
) -> torch.Tensor:
    """Compare the scores of chosen experts [T, k] with those of the reference's, whose weights are returned."""
    expected, expected_chosen = route_reference(logits, how, correction)
    scores = logits.float().softmax(-1) if how.scoring == "softmax" else logits.float().sigmoid()
    if correction is not None:
        scores += correction
    of_ours, of_theirs = (scores.gather(1, each.long()) for each in (chosen, expected_chosen))
    torch.testing.assert_close(of_ours, of_theirs, rtol=tolerance, atol=tolerance)
    return expected


@holds(interpreted=[{}], gpu=[{}])
def scores_of_logits_in_order(dtype: torch.dtype, device: str) -> None:
    """Corrected scores may be negative, and are compared as integers."""
    how = Routing(6, normalize=False, scoring="sigmoid")
    correction = torch.tensor([0.5, -3.0, -1.25, 0.0, -1.0, 2.0, -2.0, -1.0625])
    weights, chosen = (each.cpu() for each in route(*on_device((torch.zeros(1, 8).to(dtype), how, correction), device)))
    assert chosen.tolist() == [[5, 0, 3, 4, 7, 2]]
    close(weights, torch.full((1, 6), 0.5))
