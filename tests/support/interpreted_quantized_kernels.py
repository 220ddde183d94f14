"""Kernels of 8-bit and 4-bit weights and of experts against their references in Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from proa_engine.kernels import fp8, rms_norm, silu_and_mul
from proa_engine.kernels.attention import rotate_and_cache
from proa_engine.kernels.attention.attention_plan import plan_reference
from proa_engine.kernels.attention.decode_attention import decode_attention
from proa_engine.kernels.attention.decode_plan import plan_decodes
from proa_engine.kernels.attention.paged_attention_reference import paged_attention_reference
from proa_engine.kernels.attention.prefill_attention import prefill_attention
from proa_engine.kernels.attention.store_kv import cache_rows
from proa_engine.kernels.experts import moe_pairs, moe_route
from proa_engine.kernels.experts.moe import ExpertMatrices, FusedExperts, LoopedExperts
from proa_engine.kernels.experts.moe_pairs import ExpertRange
from proa_engine.kernels.fp8 import Fp8Form, dequantize_rows, quantize_reference
from proa_engine.kernels.products import fp8_linear
from proa_engine.kernels.products.linear import Linear
from proa_engine.kernels.silu_and_mul import ClampedSwiGLU
from support.fp4_cases import KINDS, experts_of, fp4_case
from support.interpreter import TOLERANCE, close
from support.kernel_cases import AttentionCase, attention_case
from support.quantized_cases import (
    FORMS,
    ROUTINGS,
    assert_same_blocks,
    assert_same_rows,
    expert_case,
    matrix_in_blocks,
    routing,
)


def check_fp8_rounding(dtype: torch.dtype) -> None:
    """Every number of 8 bits, the middles between neighbours, and what lies beside them."""
    numbers = torch.arange(256, dtype=torch.uint8).view(fp8.FP8).float()
    numbers = numbers[numbers.isfinite()].sort().values
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, middles, middles * 1.001, middles * 0.999]).clamp(-448, 448)[None]
    form = Fp8Form(scale=torch.ones(1))
    assert_same_rows(fp8.quantize(x, form), quantize_reference(x, form), share=0)


def check_quantize(dtype: torch.dtype) -> None:
    for form in FORMS:
        x = torch.randn(5, 384).to(dtype)
        x[3] = 0
        assert_same_rows(fp8.quantize(x, form), quantize_reference(x, form), share=0)


def check_norm_and_silu(dtype: torch.dtype) -> None:
    for form in FORMS:
        x, residual = torch.randn(2, 4, 256).to(dtype)
        weight = torch.randn(256).to(dtype)
        ours = rms_norm.rms_norm_fp8(x, None, weight, 1e-6, form)[0]
        assert_same_rows(ours, quantize_reference(rms_norm.rms_norm_reference(x, weight, 1e-6), form))
        ours, total = rms_norm.rms_norm_fp8(x, residual.clone(), weight, 1e-6, form)
        theirs, expected_total = rms_norm.add_rms_norm_reference(x.clone(), residual, weight, 1e-6)
        assert_same_rows(ours, quantize_reference(theirs, form))
        close(total, expected_total)
        x = torch.randn(3, 2 * 384).to(dtype)
        ours = silu_and_mul.activate_and_mul_fp8(x, "silu", form)
        assert_same_rows(ours, quantize_reference(silu_and_mul.activate_and_mul_reference(x, "silu"), form))


def check_cache(dtype: torch.dtype) -> None:
    """Keys and values in 8 bits: written, and read by both kernels of attention as the floats that they stand for."""
    heads = torch.randn(5, 4 + 2 * 2, 16).to(dtype) * 300  # some beyond the range
    cos, sin = torch.randn(2, 5, 8)
    cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    slots = torch.tensor([9, -1, 23, 0, 7])
    ours = torch.zeros(2, 6, 2, 4, 16).to(fp8.FP8)
    theirs, scales = ours.clone(), (0.5, 2.0)
    rotate_and_cache.rotate_and_cache(heads, None, cos, sin, ours[0], ours[1], slots, cache_scales=scales)
    rows = cache_rows(slots, theirs[0].shape, theirs[0].stride(0))
    rotate_and_cache.rotate_and_cache_reference(heads, None, cos, sin, theirs[0], theirs[1], rows, scales)
    differ = ours.float() != theirs.float()
    assert differ.float().mean() < 0.01
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.14, atol=2**-9)
    for lens in ([(1, 1), (1, 37), (1, 300)], [(1, 33), (3, 3), (70, 90)]):
        case = attention_case(lens, dtype=dtype)
        in_8_bits = case.key_cache.to(fp8.FP8), case.value_cache.to(fp8.FP8)
        as_floats = in_8_bits[0].to(dtype), in_8_bits[1].to(dtype)
        result = attention_on_triton(case, *in_8_bits)
        close(result, attention_on_triton(case, *as_floats), TOLERANCE[dtype])
        plan = plan_reference(*batch_of(case), case.key_cache.shape, None)
        close(result, paged_attention_reference(case.query, *in_8_bits, plan, 0.25), TOLERANCE[dtype])


def attention_on_triton(case: AttentionCase, key_cache: torch.Tensor, value_cache: torch.Tensor) -> torch.Tensor:
    query_start_loc, seq_lens, block_table = batch_of(case)
    out = torch.full_like(case.query, torch.nan)
    plan = plan_decodes(seq_lens, case.metadata.num_decodes, key_cache.shape[1], None)
    num_decodes = case.metadata.num_decodes
    decode_attention(case.query, key_cache, value_cache, block_table, out, plan, 0.25)
    if num_decodes < len(seq_lens):
        prefill_attention(
            case.query, key_cache, value_cache, query_start_loc, seq_lens, block_table, out, num_decodes, 0.25, None
        )
    return out


def batch_of(case: AttentionCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    metadata = case.metadata
    return metadata.query_start_loc, metadata.seq_lens, metadata.tables[0].block_table


def check_block_matmul(dtype: torch.dtype) -> None:
    for rows, outputs, bias in ((1, 128, None), (3, 200, torch.randn(200)), (150, 256, None)):
        weight, scales = matrix_in_blocks(outputs, 256)
        x = quantize_reference(torch.randn(rows, 256).to(dtype), Fp8Form(group=128))
        expected = Linear(fp8.dequantize_blocks(weight, scales), bias)(dequantize_rows(x)).to(dtype)
        close(fp8_linear.fp8_block_matmul(x, weight, scales, bias), expected)


def check_route(dtype: torch.dtype) -> None:
    for experts, how in ROUTINGS:
        logits = torch.randn(5, experts).to(dtype)
        logits[2] = logits[2, 0]  # all equal: the first ones
        correction = torch.randn(experts) * 0.1 if how.scoring == "sigmoid" else None
        weights, chosen = moe_route.route(logits, how, correction)
        expected, expected_chosen = moe_route.route_reference(logits, how, correction)
        if correction is None:
            assert chosen[2].tolist() == list(range(how.num_chosen))
        # Among equal ones any may be chosen, in any order.
        scores = logits.float().softmax(-1) if correction is None else logits.float().sigmoid() + correction
        of_ours, of_theirs = (scores.gather(1, each.long()) for each in (chosen, expected_chosen))
        torch.testing.assert_close(of_ours, of_theirs)
        torch.testing.assert_close(weights, expected)


def check_align(dtype: torch.dtype) -> None:
    for tokens, k, held, block_size in (
        (1, 2, ExpertRange.all(8), 16),
        (3, 1, ExpertRange.all(1), 16),
        (130, 3, ExpertRange.all(5), 16),
        (300, 4, ExpertRange.all(24), 32),
        (1025, 1, ExpertRange.all(4), 64),
        (2500, 8, ExpertRange.all(9), 128),  # more than one chunk a segment
        (1, 2, ExpertRange(3, 1, 8), 16),
        (130, 3, ExpertRange(0, 2, 5), 16),
        (300, 4, ExpertRange(16, 8, 24), 32),
        (2500, 8, ExpertRange(4, 5, 9), 128),
    ):
        chosen = routing(tokens, k, held.total)
        ours = moe_pairs.align_pairs(chosen, held, block_size)
        theirs = moe_pairs.align_pairs_reference(chosen, held, block_size)
        assert_same_blocks(ours, theirs)


def check_ranges_of_experts(dtype: torch.dtype) -> None:
    """Unequal ranges of experts add up to all of them, whatever memory holds of the pairs of others."""
    activation, tolerance = ClampedSwiGLU(alpha=1.702, limit=1.5), 5 * TOLERANCE[dtype]
    for tokens in (1, 100):
        case = expert_case(tokens, hidden=96, inner=40, experts=7, k=3, dtype=dtype)
        arguments = (case.x, case.weights, case.experts)
        gate_up_bias, down_bias = torch.randn(7, 80).to(dtype), torch.randn(7, 96).to(dtype)
        total = torch.zeros(tokens, 96)
        for held in (ExpertRange(0, 3, 7), ExpertRange(3, 3, 7), ExpertRange(6, 1, 7)):
            part = slice(held.first, held.first + held.size)
            first = Linears(case.gate_up[part], gate_up_bias[part])
            second = Linears(case.down[part], down_bias[part])
            fused = FusedExperts(first.matrices, second.matrices, activation=activation, held=held)
            looped = LoopedExperts(first.products, second.products, activation, held)
            with unwritten_memory_is_nan():
                ours, theirs = fused(*arguments), looped(*arguments)
            close(ours, theirs, tolerance)
            total += ours.float()
        whole = LoopedExperts(
            Linears(case.gate_up, gate_up_bias).products, Linears(case.down, down_bias).products, activation
        )
        close(total, whole(*arguments).float(), 3 * tolerance)


@dataclass(frozen=True)
class Linears:
    """Matrices of experts with biases."""

    weight: torch.Tensor
    bias: torch.Tensor

    @property
    def matrices(self) -> ExpertMatrices:
        return ExpertMatrices(self.weight, bias=self.bias)

    @property
    def products(self) -> list[Linear]:
        return [Linear(weight, bias) for weight, bias in zip(self.weight, self.bias, strict=True)]


@contextmanager
def unwritten_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # `torch.empty` then fills its memory with NaN
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_experts(dtype: torch.dtype) -> None:
    for tokens in (1, 7, 100):
        case = expert_case(tokens, hidden=96, inner=40, experts=6, k=2, dtype=dtype)
        fused = FusedExperts(ExpertMatrices(case.gate_up), ExpertMatrices(case.down))
        looped = LoopedExperts([Linear(w) for w in case.gate_up], [Linear(w) for w in case.down])
        arguments = (case.x, case.weights, case.experts)
        close(fused(*arguments), looped(*arguments), 5 * TOLERANCE[dtype])


def check_experts_with_biases(dtype: torch.dtype) -> None:
    activation = ClampedSwiGLU(alpha=1.702, limit=1.5)
    for tokens in (1, 100):
        case = expert_case(tokens, hidden=96, inner=40, experts=6, k=2, dtype=dtype)
        gate_up_bias, down_bias = torch.randn(6, 80).to(dtype), torch.randn(6, 96).to(dtype)
        fused = FusedExperts(
            ExpertMatrices(case.gate_up, bias=gate_up_bias),
            ExpertMatrices(case.down, bias=down_bias),
            activation=activation,
        )
        looped = LoopedExperts(
            [Linear(w, b) for w, b in zip(case.gate_up, gate_up_bias, strict=True)],
            [Linear(w, b) for w, b in zip(case.down, down_bias, strict=True)],
            activation,
        )
        arguments = (case.x, case.weights, case.experts)
        close(fused(*arguments), looped(*arguments), 5 * TOLERANCE[dtype])


def check_clamped_swiglu(dtype: torch.dtype) -> None:
    x = torch.randn(3, 2 * 1100).to(dtype) * 8
    options = ClampedSwiGLU(alpha=1.702, limit=7.0)
    close(options(x), silu_and_mul.clamped_swiglu_reference(x, options))


def check_experts_in_4_bit_floats(dtype: torch.dtype) -> None:
    for kind in KINDS:
        for tokens, hidden, inner, has_bias in ((1, 96, 32, True), (9, 128, 160, False), (100, 192, 64, True)):
            case = expert_case(tokens, hidden=hidden, inner=inner, experts=6, k=2, dtype=dtype)
            both = torch.randn(6, 2 * inner).to(dtype), torch.randn(6, hidden).to(dtype)
            biases = both if has_bias else (None, None)
            gate_up, first = experts_of(fp4_case(kind, 6, 2 * inner, hidden), biases[0])
            down, second = experts_of(fp4_case(kind, 6, hidden, inner), biases[1])
            arguments = (case.x, case.weights, case.experts)
            ours = FusedExperts(gate_up, down)(*arguments)
            theirs = LoopedExperts(first, second)(*arguments)
            close(ours / theirs.abs().max(), theirs / theirs.abs().max(), 5 * TOLERANCE[dtype])


def check_experts_in_8_bits(dtype: torch.dtype) -> None:
    case = expert_case(40, hidden=256, inner=128, experts=6, k=2, dtype=dtype)
    arguments = (case.x, case.weights, case.experts)
    for form, kind, quantized in (
        (Fp8Form(), fp8_linear.Fp8Linear, case.in_channels()),
        (Fp8Form(group=128), fp8_linear.Fp8BlockLinear, case.in_blocks()),
    ):
        (gate_up, gate_up_scales), (down, down_scales) = quantized
        fused = FusedExperts(ExpertMatrices(gate_up, gate_up_scales), ExpertMatrices(down, down_scales), form)
        looped = LoopedExperts(
            [kind(w, s, None, form) for w, s in zip(gate_up, gate_up_scales, strict=True)],
            [kind(w, s, None, form) for w, s in zip(down, down_scales, strict=True)],
        )
        ours, theirs = fused(*arguments), looped(*arguments)
        error = (ours - theirs).abs().mean() / theirs.abs().mean()
        assert error < 0.005, error  # here and there a rounding of the hidden numbers that lie in the middle


def check_combine(dtype: torch.dtype) -> None:
    pairs, experts = torch.randn(5, 3, 1100).to(dtype), routing(5, 3, 7)
    everything, held = ExpertRange.all(7), ExpertRange(2, 3, 7)
    expected = pairs.double().sum(1)
    close(moe_pairs.combine_pairs(pairs, experts, everything), expected.to(dtype))
    is_held = moe_pairs.is_held(experts, held)[..., None]
    expected = pairs.double().masked_fill(~is_held, 0).sum(1)
    pairs = pairs.masked_fill(~is_held, torch.nan)
    for combine in (moe_pairs.combine_pairs, moe_pairs.combine_pairs_reference):
        close(combine(pairs, experts, held), expected.to(dtype))
