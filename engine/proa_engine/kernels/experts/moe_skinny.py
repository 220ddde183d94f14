"""Experts of one or two tokens, whose time is that of reading the weights of the chosen experts.

As in `skinny_gemm`, there are as many programs as the device can run at once, and each loads the next block of a weight
while it multiplies one. A program of `moe_skinny_gate_kernel` has one (token, expert) pair and some of its outputs, and
ends with the activation. One of `moe_skinny_down_kernel` has all pairs of a token and some outputs, so it sums them
itself. It loads its first block before the first kernel has ended; that one lets it start once the chosen experts are
known.

Numbers are rounded where they are with more tokens (`moe_few`): gate and up to x's type before the activation, each
pair's output before the sum. Products and pairs are added in another order.

`moe_few` is slower here: its tiles of 16 rows are mostly padding, and a matrix of Qwen3-30B-A3B has 192 tiles of 64
outputs for the 132 multiprocessors of an H200. A layer's choice of experts and both products took 25.2 us there for one
token (46.7 by `moe_few`), of which 17.7 are that of reading, and 43.6 for two (52.7).
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from proa_engine.kernels.experts.moe_few import ExpertWeights
from proa_engine.kernels.experts.moe_pairs import ExpertRange
from proa_engine.kernels.experts.moe_product import rows_per_output
from proa_engine.kernels.launch import INT32_END, cdiv, kernel, next_power_of_2, num_multiprocessors
from proa_engine.kernels.products.skinny_gemm import WARPS_PER_MULTIPROCESSOR, load_block
from proa_engine.kernels.silu_and_mul import activate_product

MAX_TOKENS = 2
MOST_NUMBERS = 16384  # of a token's rows that a program holds: 32 registers of a thread in 16 warps
THREAD_BYTES = 128  # of the first product's weight in flight for each thread


def is_skinny(experts: torch.Tensor, gate_up: ExpertWeights, down: ExpertWeights) -> bool:
    """Whether `skinny_experts` computes these pairs [T, k]: of one or two tokens, by floats without biases, rows that
    fit in registers."""
    num_tokens, k = experts.shape
    return (
        num_tokens <= MAX_TOKENS
        and gate_up.form == down.form == "floats"
        and gate_up.bias is down.bias is None
        and 2 * next_power_of_2(gate_up.num_inputs) <= MOST_NUMBERS
        and next_power_of_2(k) * next_power_of_2(down.num_inputs) <= MOST_NUMBERS
    )


def skinny_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    held: ExpertRange,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    activation: Mapping[str, object],
) -> torch.Tensor:
    """x [T, N], weights [T, k] float32, experts [T, k] int32 -> the weighted sum over the held experts of each token,
    [T, N]. `activation`: the constants of `activate_product`. GPU only; its reference is `LoopedExperts`.
    """
    hidden = skinny_gate(x, experts, held, gate_up, activation)
    return skinny_combine(hidden, weights, experts, held, down)


def skinny_gate(
    x: torch.Tensor, experts: torch.Tensor, held: ExpertRange, gate_up: ExpertWeights, activation: Mapping[str, object]
) -> torch.Tensor:
    """x [T, N] -> activation of [gate | up], or of up alone, of each pair, [T * k, width]. Rows of experts that are not
    held are not written."""
    num_pairs, k = experts.numel(), experts.shape[1]
    parts = rows_per_output(activation)
    num_outputs, num_inputs = gate_up.num_outputs // parts, gate_up.num_inputs
    assert x.is_contiguous()
    assert gate_up.values.is_contiguous()
    assert gate_up.num_outputs * num_inputs < INT32_END
    out = torch.empty((num_pairs, num_outputs), dtype=x.dtype, device=x.device)
    block_k = next_power_of_2(num_inputs)
    num_warps = 8 if block_k <= 4096 else 16
    block_n = max(THREAD_BYTES * 32 * num_warps // (block_k * parts * x.element_size()), 1)
    each = min(max(_num_programs(x, num_warps) // num_pairs, 1), cdiv(num_outputs, block_n))
    moe_skinny_gate_kernel[(each * num_pairs,)](
        x,
        gate_up.values,
        out,
        experts,
        num_pairs,
        held.first,
        held.size,
        num_outputs,
        num_inputs,
        **activation,
        PARTS=parts,
        K=k,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=num_warps,
    )
    return out


def skinny_combine(
    hidden: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, held: ExpertRange, down: ExpertWeights
) -> torch.Tensor:
    """hidden [T * k, width] of `skinny_gate`, which must be the launch before -> [T, N]"""
    num_tokens, k = experts.shape
    assert down.values.is_contiguous()
    assert down.num_outputs * down.num_inputs < INT32_END
    out = torch.empty((num_tokens, down.num_outputs), dtype=hidden.dtype, device=hidden.device)
    choices, block_k = next_power_of_2(k), next_power_of_2(down.num_inputs)
    num_warps = 8 if choices * block_k <= MOST_NUMBERS // 2 else 16
    each = min(max(_num_programs(hidden, num_warps) // num_tokens, 1), down.num_outputs)
    moe_skinny_down_kernel[(each, num_tokens)](
        hidden,
        down.values,
        out,
        weights,
        experts,
        held.first,
        held.size,
        down.num_outputs,
        down.num_inputs,
        K=k,
        CHOICES=choices,
        BLOCK_K=block_k,
        num_warps=num_warps,
    )
    return out


def _num_programs(x: torch.Tensor, num_warps: int) -> int:
    return num_multiprocessors(x.device) * WARPS_PER_MULTIPROCESSOR // num_warps


@kernel(do_not_specialize=["num_pairs", "first_expert", "num_held"])
def moe_skinny_gate_kernel(
    x_ptr,  # [num_pairs / K, num_inputs]
    weight_ptr,  # [held experts, PARTS * num_outputs, num_inputs]
    out_ptr,  # [num_pairs, num_outputs]
    experts_ptr,  # [num_pairs]
    num_pairs,
    first_expert,
    num_held,
    num_outputs,
    num_inputs,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PARTS: tl.constexpr,  # `rows_per_output`
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at least num_inputs
    PDL: tl.constexpr,
):
    if PDL:
        # In this order: the next kernel reads the experts before this one has ended.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0) % num_pairs
    first = tl.program_id(0) // num_pairs
    expert = tl.load(experts_ptr + pair) - first_expert
    if (expert < 0) | (expert >= num_held):
        return
    weight_ptr += expert.to(tl.int64) * PARTS * num_outputs * num_inputs
    k = tl.arange(0, BLOCK_K)[None, None, :]
    weight = load_block(weight_ptr, first, k, num_outputs, num_inputs, PARTS == 2, BLOCK_N)
    # [1, 1, BLOCK_K]
    x = tl.load(x_ptr + pair // K * num_inputs + k, mask=k < num_inputs, other=0.0).to(tl.float32)
    step = tl.num_programs(0) // num_pairs
    for block in range(first, tl.cdiv(num_outputs, BLOCK_N), step):
        following = load_block(weight_ptr, block + step, k, num_outputs, num_inputs, PARTS == 2, BLOCK_N)
        y = tl.sum(x * weight.to(tl.float32), axis=2).to(out_ptr.dtype.element_ty).to(tl.float32)
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        y = activate_product(y, ACTIVATION, ALPHA, LIMIT)
        tl.store(out_ptr + pair * num_outputs + n, y, mask=n < num_outputs)
        weight = following


@kernel(do_not_specialize=["first_expert", "num_held"])
def moe_skinny_down_kernel(
    x_ptr,  # [tokens * K, num_inputs]
    weight_ptr,  # [held experts, num_outputs, num_inputs]
    out_ptr,  # [tokens, num_outputs]
    pair_weights_ptr,  # [tokens * K]
    experts_ptr,  # [tokens * K]
    first_expert,
    num_held,
    num_outputs,
    num_inputs,
    K: tl.constexpr,
    CHOICES: tl.constexpr,  # at least K
    BLOCK_K: tl.constexpr,  # at least num_inputs
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(1)
    first = tl.program_id(0)
    step = tl.num_programs(0)
    # [CHOICES]; from the L2 cache, because this kernel has not waited yet
    choice = tl.arange(0, CHOICES)
    pair = token * K + choice
    expert = tl.load(experts_ptr + pair, mask=choice < K, other=-1, cache_modifier=".cg") - first_expert
    is_held = (choice < K) & (expert >= 0) & (expert < num_held)
    pair_weights = tl.load(pair_weights_ptr + pair, mask=is_held, other=0.0, cache_modifier=".cg")
    # [CHOICES, BLOCK_K]
    k = tl.arange(0, BLOCK_K)[None, :]
    mask = is_held[:, None] & (k < num_inputs)
    place = weight_ptr + expert.to(tl.int64)[:, None] * num_outputs * num_inputs + k
    weight = load_output(place, mask, first, num_outputs, num_inputs)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + pair[:, None] * num_inputs + k, mask=mask, other=0.0).to(tl.float32)
    for output in range(first, num_outputs, step):
        following = load_output(place, mask, output + step, num_outputs, num_inputs)
        y = tl.sum(x * weight.to(tl.float32), axis=1) * pair_weights
        total = tl.sum(y.to(out_ptr.dtype.element_ty).to(tl.float32), axis=0)
        tl.store(out_ptr + token * num_outputs + output, total)
        weight = following


@triton.jit
def load_output(place, mask, output, num_outputs, num_inputs):
    """The weights of an output by all pairs, [CHOICES, BLOCK_K]."""
    mask = mask & (output < num_outputs)
    return tl.load(place + output * num_inputs, mask=mask, other=0.0, eviction_policy="evict_first")
