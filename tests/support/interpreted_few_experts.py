"""Kernels of few (token, expert) pairs against their references in Triton's interpreter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from unittest import mock

import torch
import torch.nn.functional as F

from proa_engine.kernels.experts import moe_skinny
from proa_engine.kernels.experts.moe import (
    ExpertActivation,
    ExpertMatrices,
    FusedExperts,
    LoopedExperts,
    StackedMatrices,
)
from proa_engine.kernels.experts.moe_few import MAX_PAIRS, few_combine_reference, few_gate_reference
from proa_engine.kernels.experts.moe_few_matmul import few_combine, few_gate, new_counters
from proa_engine.kernels.experts.moe_int import pack_experts
from proa_engine.kernels.experts.moe_pairs import ExpertRange, align_pairs, is_held
from proa_engine.kernels.experts.moe_route import Routing, route, route_reference
from proa_engine.kernels.fp8 import Fp8Form
from proa_engine.kernels.products import fp8_linear
from proa_engine.kernels.products.linear import Linear
from proa_engine.kernels.relu_squared import ReluSquared
from proa_engine.kernels.silu_and_mul import (
    ClampedSwiGLU,
    GatedActivation,
    activate_and_mul_reference,
    clamped_swiglu_reference,
    silu_and_mul,
)
from support.fp4_cases import KINDS, Kind, experts_of, fp4_case
from support.interpreter import TOLERANCE, close
from support.quantized_cases import ExpertCase, expert_case, int_case

CLAMPED = ClampedSwiGLU(alpha=1.702, limit=1.5)
DEEPSEEK = Routing(8, normalize=True, scoring="sigmoid", num_groups=8, num_chosen_groups=4, scale=2.5)


@dataclass(frozen=True)
class Stored:
    """Experts in one form of weights, for the kernels and for the reference."""

    gate_up: StackedMatrices
    down: StackedMatrices
    products: tuple[Sequence[Callable[..., torch.Tensor]], Sequence[Callable[..., torch.Tensor]]]
    form: Fp8Form | None = None

    def fused(self, activation: ExpertActivation = silu_and_mul) -> FusedExperts:
        return FusedExperts(self.gate_up, self.down, self.form, activation)

    def looped(self, activation: ExpertActivation = silu_and_mul) -> LoopedExperts:
        return LoopedExperts(*self.products, activation)


def floats(case: ExpertCase, biases: tuple[torch.Tensor, torch.Tensor] | None = None) -> Stored:
    gate_up_bias, down_bias = biases or (None, None)
    return Stored(
        ExpertMatrices(case.gate_up, bias=gate_up_bias),
        ExpertMatrices(case.down, bias=down_bias),
        (linears(case.gate_up, gate_up_bias), linears(case.down, down_bias)),
    )


def linears(stacked: torch.Tensor, bias: torch.Tensor | None) -> list[Linear]:
    return [Linear(weight, None if bias is None else bias[number]) for number, weight in enumerate(stacked)]


def in_8_bits(case: ExpertCase, form: Fp8Form) -> Stored:
    (gate_up, gate_up_scales), (down, down_scales) = case.in_channels() if form.group is None else case.in_blocks()
    kind = fp8_linear.Fp8Linear if form.group is None else fp8_linear.Fp8BlockLinear
    first, second = (
        [kind(weight, scale, None, form) for weight, scale in zip(*each, strict=True)]
        for each in ((gate_up, gate_up_scales), (down, down_scales))
    )
    return Stored(ExpertMatrices(gate_up, gate_up_scales), ExpertMatrices(down, down_scales), (first, second), form)


def in_4_bits(kind: Kind, experts: int, hidden: int, inner: int, dtype: torch.dtype) -> Stored:
    biases = torch.randn(experts, 2 * inner).to(dtype), torch.randn(experts, hidden).to(dtype)
    gate_up, first = experts_of(fp4_case(kind, experts, 2 * inner, hidden), biases[0])
    down, second = experts_of(fp4_case(kind, experts, hidden, inner), biases[1])
    return Stored(gate_up, down, (first, second))


def check_both_products(dtype: torch.dtype) -> None:
    """Each against its reference in float64: one token, 64 pairs of few and of many experts, and 64 of one expert; of
    experts without a gate, too."""
    for tokens, k, experts, hidden_size, inner, activation in (
        (1, 2, 5, 104, 72, silu_and_mul),
        (1, 8, 128, 72, 40, silu_and_mul),
        (16, 4, 60, 40, 24, GatedActivation("gelu_tanh")),
        (7, 3, 5, 72, 40, CLAMPED),
        (64, 1, 3, 40, 24, silu_and_mul),
        (5, 3, 7, 72, 104, ReluSquared()),
    ):
        case = expert_case(tokens, hidden=hidden_size, inner=inner, experts=experts, k=k, dtype=dtype)
        case = without_gate(case, activation)
        if k == 1:
            case = replace(case, experts=torch.full_like(case.experts, 2))
        assert case.experts.numel() <= MAX_PAIRS
        biases = torch.randn(case.gate_up.shape[:2]).to(dtype), torch.randn(experts, hidden_size).to(dtype)
        stored, held = floats(case, biases), ExpertRange.all(experts)
        arrived = new_counters(stored.down.unsorted, case.x.device)
        arguments = case.experts, held
        hidden = few_gate(case.x, *arguments, stored.gate_up.unsorted, None, activation.constants, arrived)
        assert not arrived.any()
        matrices = (case.gate_up, biases[0]), (case.down, biases[1])
        exact = [linears(weight.double(), bias.double()) for weight, bias in matrices]
        expected = few_gate_reference(case.x.double(), *arguments, exact[0], in_torch(activation))
        close(hidden, expected.to(dtype))
        total = few_combine(hidden, case.weights, *arguments, stored.down.unsorted, None, arrived)
        assert arrived.eq(case.experts.numel()).all()
        expected = few_combine_reference(hidden.double(), case.weights.double(), *arguments, exact[1])
        close(total, expected.to(dtype), 5 * TOLERANCE[dtype])


def check_experts_of_one_and_two_tokens(dtype: torch.dtype) -> None:
    """Sizes and choices that end within a block, by few programs; experts that the rank does not hold."""
    for k, hidden_size, inner, activation in (
        (1, 72, 24, silu_and_mul),
        (3, 104, 40, CLAMPED),
        (8, 40, 24, silu_and_mul),
        (3, 104, 23, ReluSquared()),
    ):
        case = expert_case(2, hidden=hidden_size, inner=inner, experts=12, k=k, dtype=dtype)
        case = without_gate(case, activation)
        stored = floats(case)
        for held in (ExpertRange.all(12), ExpertRange(3, 5, 12)):
            gate_up, down = (
                ExpertMatrices(weight[held.first :][: held.size]).unsorted for weight in (case.gate_up, case.down)
            )
            first_products, second_products = (each[held.first :][: held.size] for each in stored.products)
            expected = LoopedExperts(first_products, second_products, activation, held)(
                case.x, case.weights, case.experts
            )
            for multiprocessors in (1, 132):
                with mock.patch.object(moe_skinny, "num_multiprocessors", return_value=multiprocessors):
                    two, (one,) = (
                        moe_skinny.skinny_experts(
                            case.x[first:],
                            case.weights[first:],
                            case.experts[first:],
                            held,
                            gate_up,
                            down,
                            activation.constants,
                        )
                        for first in (0, 1)
                    )
                close(two, expected, 5 * TOLERANCE[dtype])
                assert torch.equal(one, two[1])


def without_gate(case: ExpertCase, activation: ExpertActivation) -> ExpertCase:
    """The experts with up alone, if the activation has no gate."""
    if not isinstance(activation, ReluSquared):
        return case
    return replace(case, gate_up=case.gate_up.chunk(2, dim=1)[1].contiguous())


def in_torch(activation: ExpertActivation) -> Callable[[torch.Tensor], torch.Tensor]:
    if isinstance(activation, GatedActivation):
        return lambda x: activate_and_mul_reference(x, activation.name)
    if isinstance(activation, ReluSquared):
        return lambda x: F.relu(x).square()
    assert isinstance(activation, ClampedSwiGLU)
    return lambda x: clamped_swiglu_reference(x, activation)


def check_few_pairs_get_the_numbers_of_many(dtype: torch.dtype) -> None:
    """The numbers are rounded at the same places for every form of weights, so 8 bits are the same 8 bits."""
    case = expert_case(33, hidden=128, inner=128, experts=3, k=2, dtype=dtype)
    assert case.experts.numel() > MAX_PAIRS
    static = Fp8Form(scale=torch.tensor([0.02]))
    relu_squared = ReluSquared()
    stored = (
        floats(case),
        in_8_bits(case, Fp8Form()),
        in_8_bits(case, static),
        in_8_bits(case, Fp8Form(group=128)),
        *(in_4_bits(kind, 3, 128, 128, dtype) for kind in KINDS),
    )
    without = floats(without_gate(case, relu_squared)).fused(relu_squared)
    for fused in (without, *(each.fused() for each in stored)):
        arguments = case.x, case.weights, case.experts
        many, few = fused(*arguments)[:2], fused(*(each[:2] for each in arguments))
        close(few / many.abs().max(), many / many.abs().max())


def check_sorted_pairs_end_with_the_activation(dtype: torch.dtype) -> None:
    """The product by gate and up with its activation is the product and then the activation, in each form of weights
    that are multiplied by floats; widths that end within a tile, and more than one block of an expert. NumPy's products
    and exponentials depend on the order of the columns, so the bits are not compared."""
    tokens, k, held = 57, 3, ExpertRange(1, 4, 5)
    for inner, block_size, activation in (
        (40, 16, silu_and_mul),
        (104, 64, GatedActivation("gelu_tanh")),
        (72, 16, CLAMPED),
    ):
        case = expert_case(tokens, hidden=96, inner=inner, experts=5, k=k, dtype=dtype)
        stored: tuple[StackedMatrices, ...] = (
            ExpertMatrices(case.gate_up[1:], bias=torch.randn(4, 2 * inner).to(dtype)),
            experts_of(fp4_case("mxfp4", 4, 2 * inner, 96), torch.randn(4, 2 * inner).to(dtype))[0],
            pack_experts(int_case(4, 2 * inner, 96, bits=4, group_size=32, dtype=dtype)),
        )
        blocks = align_pairs(case.experts, held, block_size)
        is_written = is_held(case.experts, held).flatten()
        for matrices in stored:
            apart = activation(matrices.multiply(case.x, blocks, None, k))
            ours = matrices.multiply(case.x, blocks, None, k, activation.constants)
            close(ours[is_written], apart[is_written])
    up = ExpertMatrices(case.gate_up[1:, :72].contiguous())
    ours = up.multiply(case.x, blocks, None, k, ReluSquared().constants)
    close(ours[is_written], F.relu(up.multiply(case.x, blocks, None, k)).square()[is_written])


def check_a_rank_sums_its_own_experts(dtype: torch.dtype) -> None:
    """Pairs of other ranks' experts are absent; a token or a whole rank without pairs gets zeros."""
    case = expert_case(7, hidden=40, inner=24, experts=60, k=4, dtype=dtype)
    chosen = case.experts % 20  # none of the last 40
    chosen[3] = torch.tensor([0, 1, 2, 3])
    arguments = case.x, case.weights, chosen
    total = torch.zeros_like(case.x)
    for first, size in ((0, 7), (7, 13), (20, 40)):
        held = ExpertRange(first, size, 60)
        own = replace(case, gate_up=case.gate_up[held.first :][:size], down=case.down[held.first :][:size])
        part = FusedExperts(ExpertMatrices(own.gate_up), ExpertMatrices(own.down), held=held)(*arguments)
        assert part[3].any() == (first == 0)
        assert part.any() == (first < 20)
        total += part
    close(total, floats(case).looped()(*arguments), 5 * TOLERANCE[dtype])


def check_routed_with_groups_and_a_correction(dtype: torch.dtype) -> None:
    case = expert_case(8, hidden=64, inner=32, experts=256, k=8, dtype=dtype)
    logits, correction = torch.randn(8, 256).to(dtype), torch.randn(256) * 0.1
    stored = floats(case)
    ours = stored.fused()(case.x, *route(logits, DEEPSEEK, correction))
    theirs = stored.looped()(case.x, *route_reference(logits, DEEPSEEK, correction))
    close(ours, theirs, 5 * TOLERANCE[dtype])
