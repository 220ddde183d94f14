"""Routers of mixtures of experts: the choice of experts by logits, and with the norm and the product before it."""

from typing import Any

import torch

from proa_engine.kernels.experts.moe_route import Routing, route, route_reference
from proa_engine.kernels.experts.moe_router import choose_tiling, norm_and_route
from proa_engine.kernels.products.product_tile import new_counters
from proa_engine.kernels.products.skinny_gemm import UnnormedRows, skinny_gemm_linear_reference, unnormed_rows
from proa_engine.kernels.tilings import TILINGS
from support.kernels.case import close, equal, grid, holds, on_device, table
from support.quantized_cases import ROUTINGS

IN_GROUPS = Routing(8, True, "sigmoid", num_groups=8, num_chosen_groups=4, scale=2.5)  # DeepSeek-V3
SIGMOID = Routing(6, True, "sigmoid", scale=1.5)
SCORES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # errors of scores by rounded logits
OF_16_BITS = (torch.float16, torch.bfloat16)  # what the kernel takes on a GPU


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
    expected = assert_chosen(chosen, logits, how, correction, SCORES[torch.float32])
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


def router(
    rows: int, experts: int, inputs: int, how: Routing, dtype: torch.dtype, *, is_first: bool, has_bias: bool
) -> tuple[UnnormedRows, torch.Tensor, torch.Tensor | None, Routing, torch.Tensor | None]:
    """Rows without a residual if `is_first`; weights of the product; and how experts are chosen."""
    x, residual = torch.randn(2, rows, inputs).to(dtype)
    x[2], residual[2] = 0, 0
    norm_weight = torch.randn(inputs).to(dtype)
    weight = (torch.randn(experts, inputs) * 2 / inputs**0.5).to(dtype)
    bias = torch.randn(experts).to(dtype) if has_bias else None
    # As slices of wider rows, of which the norm may be.
    x = torch.cat((x, x), dim=1)[:, :inputs]
    unnormed = unnormed_rows(x, None if is_first else residual, norm_weight, 1e-6)
    return unnormed.keeping_norm(), weight, bias, how, correction_of(how, experts)


def run(
    rows: UnnormedRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    how: Routing,
    correction: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Returns weights, experts, the sum with the residual, and its norm."""
    tiling = choose_tiling(weight.shape[1], TILINGS[90].router)
    arrived = new_counters(weight.device)
    choice = norm_and_route(rows, weight, bias, how, correction, arrived, tiling)
    assert not arrived.any(), "the next launch expects zeros"
    assert rows.normed is not None
    return *choice, rows.total, rows.normed


SHAPES = table(
    "rows experts inputs how is_first has_bias",
    (3, 128, 2048, Routing(8, normalize=True), False, False),
    (5, 8, 64, Routing(2, normalize=True), True, False),
    (17, 32, 2880, Routing(4, normalize=True), False, True),  # gpt-oss
    (100, 60, 512, Routing(4, normalize=False), False, False),
    (256, 32, 96, Routing(8, normalize=True), False, False),
    (9, 128, 2688, SIGMOID, False, False),  # Nemotron 3
    (4, 256, 4096, IN_GROUPS, False, False),
    (13, 36, 160, Routing(5, True, "sigmoid", num_groups=3, num_chosen_groups=2), True, True),
    (3, 512, 2048, Routing(10, normalize=True), False, False),  # Qwen3-Next
)


@holds(
    interpreted=SHAPES,
    gpu=grid(
        table(
            "experts inputs how is_first has_bias",
            (128, 2048, Routing(8, normalize=True), False, False),
            (32, 2880, Routing(4, normalize=True), False, True),
            (64, 2048, SIGMOID, False, False),
            (512, 2048, Routing(10, normalize=True), True, False),
        ),
        rows=(3, 8, 64, 256),
    ),
    dtypes=OF_16_BITS,
)
def norms_and_routes(
    dtype: torch.dtype, device: str, rows: int, experts: int, inputs: int, how: Routing, is_first: bool, has_bias: bool
) -> None:
    """A row of zeros has equal logits, so that its experts are the first ones."""
    arguments: Any = router(rows, experts, inputs, how, dtype, is_first=is_first, has_bias=has_bias)
    unnormed, weight, bias, _, correction = on_device(arguments, "cpu")
    logits = skinny_gemm_linear_reference(unnormed, weight, bias)
    weights, chosen, total, normed = (each.cpu() for each in run(*on_device(arguments, device)))
    equal(total, unnormed.total)
    tolerance = SCORES[dtype]
    torch.testing.assert_close(normed, unnormed.normed, rtol=tolerance, atol=tolerance)
    if bias is correction is None:
        assert chosen[2].tolist() == list(range(how.num_chosen))
    expected = assert_chosen(chosen, logits, how, correction, tolerance)
    torch.testing.assert_close(weights, expected, rtol=2 * tolerance, atol=2 * tolerance)


@holds(
    interpreted=[{"inputs": 96}, {"inputs": 2560}],
    gpu=grid(inputs=(2048, 2880)),
    dtypes=OF_16_BITS,
)
def routed_rows_do_not_depend_on_others(dtype: torch.dtype, device: str, inputs: int) -> None:
    how = Routing(4, normalize=True)
    rows, *others = router(20, 40, inputs, how, dtype, is_first=False, has_bias=True)
    assert rows.residual is not None
    some = unnormed_rows(rows.x[5:8], rows.residual[5:8].clone(), rows.weight, rows.eps).keeping_norm()
    whole, part = (run(*on_device((each, *others), device)) for each in (rows, some))
    for ours, alone in zip(whole, part, strict=True):
        equal(ours[5:8], alone)


@holds(interpreted=[{}], gpu=[{}])
def scores_of_logits_in_order(dtype: torch.dtype, device: str) -> None:
    """Corrected scores may be negative, and are compared as integers."""
    how = Routing(6, normalize=False, scoring="sigmoid")
    correction = torch.tensor([0.5, -3.0, -1.25, 0.0, -1.0, 2.0, -2.0, -1.0625])
    weights, chosen = (each.cpu() for each in route(*on_device((torch.zeros(1, 8).to(dtype), how, correction), device)))
    assert chosen.tolist() == [[5, 0, 3, 4, 7, 2]]
    close(weights, torch.full((1, 6), 0.5))
