"""Kernels of 8-bit integers in Triton's interpreter, against exact sums and compressed-tensors' formulas."""

import torch

from proa_engine.kernels.experts.moe import ExpertMatrices, FusedExperts, LoopedExperts
from proa_engine.kernels.experts.moe_few import MAX_PAIRS
from proa_engine.kernels.fp8 import QuantizedRows
from proa_engine.kernels.int8 import Int8Form, quantize_int8, quantize_int8_reference
from proa_engine.kernels.products.int8_linear import Int8Linear, int8_matmul, int8_matmul_reference
from support.interpreter import TOLERANCE, close
from support.quantized_cases import INT8_FORMS, expert_case, in_integers


def check_rows(dtype: torch.dtype) -> None:
    """Rows of zeros, of one sign, of numbers in the middle between two integers, and beyond the range."""
    for size, form in ((1, Int8Form()), *((size, form) for size in (200, 384) for form in INT8_FORMS)):
        x = torch.randn(7, size).to(dtype)
        x[1], x[2], x[3], x[4] = 0, x[2].abs(), -x[3].abs(), 1000 * x[4]
        step = 0.5 if form.scale is None else 0.5 * float(form.scale)
        x[5] = (torch.arange(size) % 9 - 4) * step  # middles between integers
        ours, theirs = quantize_int8(x, form), quantize_int8_reference(x, form)
        assert torch.equal(ours.values, theirs.values)
        assert torch.equal(ours.scales, theirs.scales)
        assert (ours.zeros is None) == (theirs.zeros is None) == form.symmetric
        if ours.zeros is not None and theirs.zeros is not None:
            assert torch.equal(ours.zeros, theirs.zeros)
        dequantized = (ours.values - (0 if ours.zeros is None else ours.zeros)) * ours.scales
        assert not dequantized[1].any()
        if form.scale is None:  # the largest of symmetric rows is half a step beyond the range
            assert ((dequantized - x.float()).abs() <= 0.51 * ours.scales).all()


def check_matmul(dtype: torch.dtype) -> None:
    """Integers of the whole range, whose sums are exact: beyond 2^24 too, which float32 would round."""
    for rows, outputs, inputs, bias in (
        (1, 40, 72, None),
        (5, 136, 1100, torch.randn(136)),
        (37, 24, 264, None),
        (130, 72, 40, torch.randn(72)),
    ):
        weight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
        values = torch.randint(-128, 128, (rows, inputs), dtype=torch.int8)
        weight[0], values[0] = -128, -128
        scales, x_scales = torch.rand(outputs) * 1e-4 + 1e-4, torch.rand(rows, 1) * 1e-4 + 1e-4
        for zeros in (None, torch.randint(-128, 128, (rows, 1), dtype=torch.int32)):
            x = QuantizedRows(values, x_scales, dtype, zeros)
            sums = None if zeros is None else weight.sum(1, dtype=torch.int32)
            exact = (values.long() - (0 if zeros is None else zeros.long())) @ weight.long().t()
            expected = exact.float() * x_scales * scales + (0 if bias is None else bias)
            ours = int8_matmul(x, weight, scales, sums, bias)
            assert torch.equal(int8_matmul_reference(x, weight.float(), scales, sums, bias), ours)
            close(ours, expected.to(dtype), 1e-6 if dtype == torch.float32 else None)


def check_experts(dtype: torch.dtype) -> None:
    """Few pairs and sorted ones, with scales of tokens, and with static ones that differ between the two products."""
    static = Int8Form(scale=torch.tensor([0.03])), Int8Form(scale=torch.tensor([0.006]))
    for tokens in (3, 33):
        case = expert_case(tokens, hidden=136, inner=40, experts=4, k=2, dtype=dtype)
        assert (case.experts.numel() <= MAX_PAIRS) == (tokens == 3)
        arguments = (case.x, case.weights, case.experts)
        for form, down_form in ((Int8Form(), Int8Form()), static):
            (gate_up, gate_up_scales), (down, down_scales) = in_integers(case.gate_up), in_integers(case.down)
            fused = FusedExperts(
                ExpertMatrices(gate_up, gate_up_scales), ExpertMatrices(down, down_scales), form, down_form=down_form
            )
            looped = LoopedExperts(
                [Int8Linear(w, s, None, form) for w, s in zip(gate_up, gate_up_scales, strict=True)],
                [Int8Linear(w, s, None, down_form) for w, s in zip(down, down_scales, strict=True)],
            )
            ours, theirs = fused(*arguments), looped(*arguments)
            error = (ours - theirs).abs().mean() / theirs.abs().mean()
            assert error < max(0.002, TOLERANCE[dtype]), error  # here and there a hidden number is rounded otherwise
