"""Kernels of integer weights against products by the dequantized weights in float64, in Triton's interpreter."""

from dataclasses import replace
from unittest import mock

import torch

from proa_engine.kernels.experts.moe import FusedExperts, LoopedExperts
from proa_engine.kernels.experts.moe_int import pack_experts
from proa_engine.kernels.experts.moe_pairs import ExpertRange
from proa_engine.kernels.int_weights import IntWeight, dequantize_int, pack_int
from proa_engine.kernels.products.int_linear import int_matmul
from proa_engine.kernels.products.linear import Linear
from proa_engine.kernels.tilings import TILINGS
from support.interpreter import TOLERANCE, close
from support.quantized_cases import expert_case, int_case


def check_matmul(dtype: torch.dtype) -> None:
    """Inputs that end within a block, and groups as large as, larger and smaller than one."""
    for rows, outputs, inputs, group_size, bits in (
        (1, 72, 128, 128, 4),
        (3, 130, 192, 64, 4),
        (17, 72, 160, 32, 8),
        (17, 72, 288, 96, 4),
        (65, 40, 256, 256, 4),
        (130, 136, 256, 128, 8),
        (2, 24, 40, 40, 8),
    ):
        weight = int_case(outputs, inputs, bits=bits, group_size=group_size, dtype=dtype)
        compare(weight, rows, dtype, bias=torch.randn(outputs).to(dtype) if rows % 2 else None)


def check_matmul_with_the_tiles_of_a_b200(dtype: torch.dtype) -> None:
    with mock.patch("proa_engine.kernels.products.int_linear.tilings_of", return_value=TILINGS[100]):
        for rows, bits in ((65, 4), (130, 8)):
            compare(int_case(72, 160, bits=bits, group_size=32, dtype=dtype), rows, dtype)


def check_fractional_zeros(dtype: torch.dtype) -> None:
    """Scales and zeros in float32, whatever the type of x, as GGUF's blocks have them."""
    for rows, outputs, inputs, bits in ((1, 72, 128, 4), (17, 72, 288, 8), (65, 40, 256, 4)):
        weight = int_case(outputs, inputs, bits=bits, group_size=32, dtype=torch.float32)
        weight = replace(weight, zeros=weight.zeros + torch.rand(weight.zeros.shape))
        compare(weight, rows, dtype)


def check_inputs_out_of_order(dtype: torch.dtype) -> None:
    """All inputs, and those of one of two ranks, which has some of each group."""
    for bits in (4, 8):
        weight = int_case(72, 256, bits=bits, group_size=128, shuffled=True, dtype=dtype)
        assert weight.groups is not None
        compare(weight, 5, dtype)
        assert pack_int(weight).group == 128
        part = replace(weight, numbers=weight.numbers[:, 96:], groups=weight.groups[96:], is_part=True)
        compare(part, 5, dtype)


def compare(weight: IntWeight, rows: int, dtype: torch.dtype, bias: torch.Tensor | None = None) -> None:
    x = torch.randn(rows, weight.numbers.shape[1]).to(dtype)
    expected = x.double() @ dequantize_int(weight).to(dtype).double().t()
    if bias is not None:
        expected += bias.double()
    ours = int_matmul(x, pack_int(weight), bias).double()
    close(ours / expected.abs().max(), expected / expected.abs().max(), TOLERANCE[dtype])


def check_experts(dtype: torch.dtype) -> None:
    """Few pairs and many, on a rank with all experts and on one with some."""
    for tokens, bits, group_size, hidden, inner in ((1, 4, 32, 96, 32), (1, 8, 64, 64, 64), (33, 4, 64, 128, 64)):
        case = expert_case(tokens, hidden=hidden, inner=inner, experts=4, k=2, dtype=dtype)
        arguments = case.x, case.weights, case.experts
        for held in (ExpertRange.all(4), ExpertRange(1, 2, 4)):
            matrices = (
                int_case(held.size, 2 * inner, hidden, bits=bits, group_size=group_size, dtype=dtype),
                int_case(held.size, hidden, inner, bits=bits, group_size=group_size, dtype=dtype),
            )
            gate_up, down = (pack_experts(each) for each in matrices)
            first, second = ([Linear(weight) for weight in dequantize_int(each)] for each in matrices)
            ours = FusedExperts(gate_up, down, held=held)(*arguments)
            theirs = LoopedExperts(first, second, held=held)(*arguments)
            close(ours / theirs.abs().max(), theirs / theirs.abs().max(), 5 * TOLERANCE[dtype])


def check_few_pairs_get_the_numbers_of_many(dtype: torch.dtype) -> None:
    case = expert_case(33, hidden=64, inner=32, experts=3, k=2, dtype=dtype)
    for bits in (4, 8):
        gate_up = pack_experts(int_case(3, 64, 64, bits=bits, group_size=64, dtype=dtype))
        fused = FusedExperts(gate_up, pack_experts(int_case(3, 64, 32, bits=bits, group_size=32, dtype=dtype)))
        arguments = case.x, case.weights, case.experts
        many, few = fused(*arguments)[:2], fused(*(each[:2] for each in arguments))
        close(few / many.abs().max(), many / many.abs().max())
