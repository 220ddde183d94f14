"""Experts of few (token, expert) pairs, which are not sorted, and what they have in common with sorted ones."""

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import torch
import torch.nn.functional as F

from proa_engine.kernels.experts import moe_skinny
from proa_engine.kernels.experts.moe import ExpertActivation, FusedExperts
from proa_engine.kernels.experts.moe_few import MAX_PAIRS, few_combine_reference, few_gate_reference
from proa_engine.kernels.experts.moe_few_matmul import few_combine, few_gate, new_counters
from proa_engine.kernels.experts.moe_pairs import ExpertRange, align_pairs, is_held
from proa_engine.kernels.experts.moe_route import Routing, route, route_reference
from proa_engine.kernels.relu_squared import ReluSquared
from proa_engine.kernels.silu_and_mul import (
    ClampedSwiGLU,
    GatedActivation,
    activate_and_mul_reference,
    clamped_swiglu_reference,
)
from support.kernels.case import close, grid, holds, near, on_device, table
from support.kernels.experts import ACTIVATIONS, Weights, fused, layer, looped, weights_in
from support.kernels.quantized import in_proportion
from support.quantized_cases import ExpertCase, expert_case

DEEPSEEK = Routing(8, normalize=True, scoring="sigmoid", num_groups=8, num_chosen_groups=4, scale=2.5)


def case_of(activation: str, *sizes: int, dtype: torch.dtype) -> ExpertCase:
    """With up alone, if the activation has no gate. `sizes`: tokens, hidden, inner, experts and k."""
    tokens, hidden, inner, experts, k = sizes
    case = expert_case(tokens, hidden=hidden, inner=inner, experts=experts, k=k, dtype=dtype)
    if activation != "relu squared":
        return case
    return replace(case, gate_up=case.gate_up.chunk(2, dim=1)[1].contiguous())


def in_torch(activation: ExpertActivation) -> Callable[[torch.Tensor], torch.Tensor]:
    if isinstance(activation, GatedActivation):
        return lambda x: activate_and_mul_reference(x, activation.name)
    if isinstance(activation, ReluSquared):
        return lambda x: F.relu(x).square()
    assert isinstance(activation, ClampedSwiGLU)
    return lambda x: clamped_swiglu_reference(x, activation)


@holds(
    interpreted=table(
        "tokens k experts hidden inner activation",
        (1, 2, 5, 104, 72, "silu"),
        (1, 8, 128, 72, 40, "silu"),
        (16, 4, 60, 40, 24, "gelu"),
        (7, 3, 5, 72, 40, "clamped"),
        (64, 1, 3, 40, 24, "silu"),
        (5, 3, 7, 72, 104, "relu squared"),
    )
)
def both_products(
    dtype: torch.dtype, device: str, tokens: int, k: int, experts: int, hidden: int, inner: int, activation: str
) -> None:
    """Each against its reference in float64: one token, 64 pairs of few and of many experts, and 64 of one expert; of
    experts without a gate, too."""
    case = case_of(activation, tokens, hidden, inner, experts, k, dtype=dtype)
    if k == 1:
        case = replace(case, experts=torch.full_like(case.experts, 2))
    assert case.experts.numel() <= MAX_PAIRS
    biases = torch.randn(case.gate_up.shape[:2]).to(dtype), torch.randn(experts, hidden).to(dtype)
    both = tuple(zip((case.gate_up, case.down), biases, strict=True))
    gate_up, down = (Weights(weight, bias=bias).matrices().unsorted for weight, bias in both)
    exact = [Weights(weight.double(), bias=bias.double()).products() for weight, bias in both]
    arguments, how = (case.experts, ExpertRange.all(experts)), ACTIVATIONS[activation]
    arrived = new_counters(down, case.x.device)
    hidden_rows = few_gate(case.x, *arguments, gate_up, None, how.constants, arrived)
    assert not arrived.any()
    close(hidden_rows, few_gate_reference(case.x.double(), *arguments, exact[0], in_torch(how)).to(dtype))
    total = few_combine(hidden_rows, case.weights, *arguments, down, None, arrived)
    assert arrived.eq(case.experts.numel()).all()
    expected = few_combine_reference(hidden_rows.double(), case.weights.double(), *arguments, exact[1])
    close(total, expected.to(dtype), 5)


@holds(
    interpreted=grid(
        table(
            "k hidden inner activation",
            *((1, 72, 24, "silu"), (3, 104, 40, "clamped"), (8, 40, 24, "silu"), (3, 104, 23, "relu squared")),
        ),
        held=((0, 12), (3, 5)),
    )
)
def experts_of_one_and_two_tokens(
    dtype: torch.dtype, device: str, k: int, hidden: int, inner: int, activation: str, held: tuple[int, int]
) -> None:
    """Sizes and choices that end within a block, by few programs; experts that the rank does not hold."""
    case, own, how = (
        case_of(activation, 2, hidden, inner, 12, k, dtype=dtype),
        ExpertRange(*held, 12),
        ACTIVATIONS[activation],
    )
    first, second = (Weights(each[own.first :][: own.size]) for each in (case.gate_up, case.down))
    expected = looped(case.x, case.weights, case.experts, first, second, how, own)
    matrices = first.matrices().unsorted, second.matrices().unsorted
    for multiprocessors in (1, 132):
        with mock.patch.object(moe_skinny, "num_multiprocessors", return_value=multiprocessors):
            two, (one,) = (
                moe_skinny.skinny_experts(
                    case.x[start:], case.weights[start:], case.experts[start:], own, *matrices, how.constants
                )
                for start in (0, 1)
            )
        close(two, expected, 5)
        assert torch.equal(one, two[1])


@holds(
    interpreted=[
        *grid(
            table("hidden inner has_bias", (128, 128, False)),
            form=("float", "rows", "static", "groups"),
            activation=["silu"],
        ),
        {"hidden": 128, "inner": 128, "form": "float", "activation": "relu squared"},
        *grid(table("hidden inner has_bias", (128, 128, True)), form=("mxfp4", "nvfp4"), activation=["silu"]),
        *(
            {"hidden": 64, "inner": 32, "form": f"{bits} bits in 64", "down_form": f"{bits} bits in 32"}
            for bits in (4, 8)
        ),
    ]
)
def few_pairs_get_the_numbers_of_many(
    dtype: torch.dtype,
    device: str,
    hidden: int,
    inner: int,
    form: str,
    *,
    down_form: str | None = None,
    has_bias: bool = False,
    activation: str = "silu",
) -> None:
    """The numbers are rounded at the same places for every form of weights, so 8 bits are the same 8 bits."""
    case = case_of(activation, 33, hidden, inner, 3, 2, dtype=dtype)
    assert case.experts.numel() > MAX_PAIRS
    first, second = weights_in(form, case.gate_up, has_bias), weights_in(down_form or form, case.down, has_bias)
    experts = FusedExperts(first.matrices(), second.matrices(), first.form, ACTIVATIONS[activation])
    arguments = case.x, case.weights, case.experts
    many, few = experts(*arguments)[:2], experts(*(each[:2] for each in arguments))
    in_proportion(few, many)


@holds(
    interpreted=table(
        "inner block_size activation",
        (40, 16, "silu"),
        (104, 64, "gelu"),
        (72, 16, "clamped"),
        (72, 16, "relu squared"),
    )
)
def sorted_pairs_end_with_the_activation(
    dtype: torch.dtype, device: str, inner: int, block_size: int, activation: str
) -> None:
    """The product by gate and up with its activation is the product and then the activation, in each form of weights
    that are multiplied by floats; widths that end within a tile, and more than one block of an expert. NumPy's products
    and exponentials depend on the order of the columns, so the bits are not compared."""
    held, how = ExpertRange(1, 4, 5), ACTIVATIONS[activation]
    case = case_of(activation, 57, 96, inner, 5, 3, dtype=dtype)
    blocks, is_written = align_pairs(case.experts, held, block_size), is_held(case.experts, held).flatten()
    forms = ("float",) if activation == "relu squared" else ("float", "mxfp4", "4 bits in 32")
    for form in forms:
        matrices = weights_in(form, case.gate_up[1:], has_bias=activation != "relu squared").matrices()
        product = matrices.multiply(case.x, blocks, None, 3)
        apart = F.relu(product).square() if activation == "relu squared" else how(product)
        close(matrices.multiply(case.x, blocks, None, 3, how.constants)[is_written], apart[is_written])


@holds(
    interpreted=table(
        "tokens hidden inner experts k num_chosen ranges", (7, 40, 24, 60, 4, 20, ((0, 7), (7, 13), (20, 40)))
    ),
    gpu=grid(
        table("hidden inner experts k num_chosen ranges", (512, 256, 32, 8, 24, ((0, 8), (8, 8), (16, 8), (24, 8)))),
        tokens=(1, 8),
    ),
    dtypes=(torch.bfloat16,),
)
def ranks_sum_their_own_experts(
    dtype: torch.dtype,
    device: str,
    tokens: int,
    hidden: int,
    inner: int,
    experts: int,
    k: int,
    num_chosen: int,
    ranges: tuple[tuple[int, int], ...],
) -> None:
    """Pairs of other ranks' experts are absent; a token or a whole rank without pairs gets zeros."""
    x, weights, chosen, first, second, activation, whole = layer("float", tokens, hidden, inner, experts, k, dtype)
    chosen %= num_chosen
    if tokens > 3:
        chosen[3] = torch.arange(k)  # all of the first rank
    total = torch.zeros(tokens, hidden)
    for start, size in ranges:
        parts = (Weights(each.values[start:][:size]) for each in (first, second))
        held = ExpertRange(start, size, experts)
        part = fused(*on_device((x, weights, chosen, *parts, activation, held), device)).cpu()
        assert tokens <= 3 or part[3].any() == (start == 0)
        assert start < num_chosen or not part.any()
        total += part.float()
    expected = looped(x, weights, chosen, first, second, activation, whole)
    if device == "cpu":
        close(total.to(dtype), expected, 5)
    else:
        near(total, expected.float(), 0.02)


@holds(interpreted=[{}])
def routed_with_groups_and_a_correction(dtype: torch.dtype, device: str) -> None:
    x, _, _, *others = layer("float", 8, 64, 32, 256, 8, dtype)
    logits, correction = torch.randn(8, 256).to(dtype), torch.randn(256) * 0.1
    ours = fused(x, *route(logits, DEEPSEEK, correction), *others)
    close(ours, looped(x, *route_reference(logits, DEEPSEEK, correction), *others), 5)
