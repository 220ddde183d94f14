"""The two products of few (token, expert) pairs; `moe_few` describes the method.

`few_gate` multiplies by gate and up, and ends with the activation. A tile's rows of the weight are gate's and up's in
turn, so that one product gives both; experts without a gate have up alone. `few_combine` multiplies by down. The last
program of a tile of outputs to end sums each token's pairs there, in order (`arrive`); `few_gate` clears the counters.

Inputs of 8-bit products are quantized in the loop, by the numbers of `fp8.quantize` and `int8.quantize_int8`. With one
scale for a row each program reads its rows once before, for their largest number.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from proa_engine.kernels.arrive import arrive
from proa_engine.kernels.experts.moe_few import (
    BLOCK_M,
    BLOCK_N,
    MAX_PAIRS,
    ExpertWeights,
    find_block,
    sum_tokens,
)
from proa_engine.kernels.experts.moe_pairs import ExpertRange
from proa_engine.kernels.experts.moe_product import rows_per_output, store_pairs, tile_rows_of_weight
from proa_engine.kernels.fp4 import fp4_tile
from proa_engine.kernels.fp8 import ROUND_BEFORE, Fp8Form, to_fp8
from proa_engine.kernels.int8 import Int8Form, round_to_int8
from proa_engine.kernels.int_weights import int_tile
from proa_engine.kernels.launch import INT32_END, begin, cdiv, kernel, next_power_of_2


def few_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    held: ExpertRange,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    activation: Mapping[str, object],
    forms: tuple[Fp8Form | Int8Form | None, Fp8Form | Int8Form | None],
) -> torch.Tensor:
    """As `skinny_experts`, of up to `MAX_PAIRS` pairs. `forms`: how the inputs of `gate_up` and of `down` are
    quantized. GPU only; its reference is `LoopedExperts`."""
    arrived = new_counters(down, x.device)
    hidden = few_gate(x, experts, held, gate_up, forms[0], activation, arrived)
    return few_combine(hidden, weights, experts, held, down, forms[1], arrived)


def few_gate(
    x: torch.Tensor,
    experts: torch.Tensor,
    held: ExpertRange,
    gate_up: ExpertWeights,
    form: Fp8Form | Int8Form | None,
    activation: Mapping[str, object],
    arrived: torch.Tensor,
) -> torch.Tensor:
    """x [T, N], experts [T, k] int32 -> activation of [gate | up] of each pair, [T * k, width].

    `activation`: the constants of `activate_product`. Rows of experts that are not held are not written. Clears
    `arrived`, of `new_counters`. GPU only.
    """
    (num_pairs, k), parts = (experts.numel(), experts.shape[1]), rows_per_output(activation)
    num_outputs = gate_up.num_outputs // parts
    out = torch.empty((num_pairs, num_outputs), dtype=x.dtype, device=x.device)
    grid = (num_pairs * cdiv(num_outputs, BLOCK_N // parts),)
    moe_few_gate_matmul_kernel[grid](
        *_inputs(x, gate_up, form),
        out,
        experts,
        arrived,
        num_pairs,
        held.first,
        held.size,
        num_outputs,
        gate_up.num_inputs,
        arrived.numel(),
        **activation,
        PARTS=parts,
        COUNTERS=next_power_of_2(arrived.numel()),
        **_constants(x, k, gate_up, form),
    )
    return out


def few_combine(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    held: ExpertRange,
    down: ExpertWeights,
    form: Fp8Form | Int8Form | None,
    arrived: torch.Tensor,
) -> torch.Tensor:
    """hidden [T * k, width], weights [T, k] float32, experts [T, k] int32 -> the weighted sum over the held experts of
    each token, [T, N]. `arrived` as cleared by `few_gate`. GPU only."""
    num_pairs, (num_tokens, k) = experts.numel(), experts.shape
    pairs = torch.empty((num_pairs, down.num_outputs), dtype=hidden.dtype, device=hidden.device)
    out = torch.empty((num_tokens, down.num_outputs), dtype=hidden.dtype, device=hidden.device)
    moe_few_down_matmul_kernel[(num_pairs * arrived.numel(),)](
        *_inputs(hidden, down, form),
        pairs,
        out,
        weights,
        experts,
        arrived,
        num_pairs,
        held.first,
        held.size,
        down.num_outputs,
        down.num_inputs,
        **_constants(hidden, k, down, form),
    )
    return out


def new_counters(down: ExpertWeights, device: torch.device) -> torch.Tensor:
    """Uninitialised counters, one for each tile of the second product's outputs."""
    return torch.empty(cdiv(down.num_outputs, BLOCK_N), dtype=torch.int32, device=device)


def _inputs(x: torch.Tensor, matrix: ExpertWeights, form: Fp8Form | Int8Form | None) -> tuple[torch.Tensor | None, ...]:
    assert x.is_contiguous()
    assert matrix.values.is_contiguous()
    assert matrix.num_outputs * matrix.num_inputs < INT32_END
    assert (form is None) != matrix.form.endswith(("by row", "by block"))
    return x, None if form is None else form.scale, matrix.values, matrix.scales, matrix.bias


def _constants(x: torch.Tensor, k: int, matrix: ExpertWeights, form: Fp8Form | Int8Form | None) -> dict[str, object]:
    return {
        "K": k,
        "FORM": matrix.form,
        "GROUP": matrix.group,
        "STATIC": form is not None and form.scale is not None,
        "ROUND": ROUND_BEFORE,
        "HAS_BIAS": matrix.bias is not None,
        "MAX_PAIRS": MAX_PAIRS,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": 128 // x.element_size() if matrix.form == "floats" else 128,
        "num_warps": 4,
        "num_stages": 4,
    }


@kernel(do_not_specialize=["num_pairs", "first_expert", "num_held"])
def moe_few_gate_matmul_kernel(
    x_ptr,  # [num_pairs / K, num_inputs]
    static_ptr,  # [1], or nothing
    weight_ptr,  # [held experts, PARTS * num_outputs, num_inputs]
    weight_scales_ptr,
    bias_ptr,  # [held experts, PARTS * num_outputs], or nothing
    out_ptr,  # [num_pairs, num_outputs]
    experts_ptr,  # [num_pairs]
    arrived_ptr,  # [num_counters]
    num_pairs,
    first_expert,
    num_held,
    num_outputs,
    num_inputs,
    num_counters,
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    STATIC: tl.constexpr,
    ROUND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PARTS: tl.constexpr,  # `rows_per_output`
    COUNTERS: tl.constexpr,  # at least num_counters
    MAX_PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # rows of the weight, PARTS for each output
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    if tl.program_id(0) == 0:
        counter = tl.arange(0, COUNTERS)
        tl.store(arrived_ptr + counter, tl.zeros([COUNTERS], tl.int32), mask=counter < num_counters)
    tiles_n = tl.cdiv(num_outputs, BLOCK_N // PARTS)
    expert, pair, begins, _ = find_block(
        experts_ptr, tl.program_id(0) // tiles_n, num_pairs, first_expert, num_held, MAX_PAIRS, BLOCK_M
    )
    if not begins:
        return
    row_mask = pair < num_pairs
    first = tl.program_id(0) % tiles_n * (BLOCK_N // PARTS)
    column, column_mask = tile_rows_of_weight(first, num_outputs, PARTS, BLOCK_N)
    total = expert_tile(
        x_ptr,
        static_ptr,
        weight_ptr,
        weight_scales_ptr,
        bias_ptr,
        pair // K,
        row_mask,
        expert,
        column,
        column_mask,
        PARTS * num_outputs,
        num_inputs,
        FORM,
        GROUP,
        STATIC,
        ROUND,
        HAS_BIAS,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    store_pairs(
        out_ptr, total, None, pair, first, num_pairs, num_outputs, False, ACTIVATION, ALPHA, LIMIT, PARTS, BLOCK_N
    )


@kernel(do_not_specialize=["num_pairs", "first_expert", "num_held"])
def moe_few_down_matmul_kernel(
    x_ptr,  # [num_pairs, num_inputs]
    static_ptr,  # [1], or nothing
    weight_ptr,  # [held experts, num_outputs, num_inputs]
    weight_scales_ptr,
    bias_ptr,  # [held experts, num_outputs], or nothing
    pairs_ptr,  # [num_pairs, num_outputs]
    out_ptr,  # [num_pairs / K, num_outputs]
    pair_weights_ptr,  # [num_pairs]
    experts_ptr,  # [num_pairs]
    arrived_ptr,  # [tiles of outputs]: pairs whose output is stored
    num_pairs,
    first_expert,
    num_held,
    num_outputs,
    num_inputs,
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    STATIC: tl.constexpr,
    ROUND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MAX_PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    tiles_n = tl.cdiv(num_outputs, BLOCK_N)
    first_pair = tl.program_id(0) // tiles_n
    tile_n = tl.program_id(0) % tiles_n
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < num_outputs
    expert, pair, begins, num_held_pairs = find_block(
        experts_ptr, first_pair, num_pairs, first_expert, num_held, MAX_PAIRS, BLOCK_M
    )
    if not begins:
        if (num_held_pairs == 0) & (first_pair == 0):  # there is no block, so the sums are zeros
            sum_tokens(
                pairs_ptr, out_ptr, experts_ptr, column, num_pairs, first_expert, num_held, num_outputs, K, BLOCK_M
            )
        return
    row_mask = pair < num_pairs
    total = expert_tile(
        x_ptr,
        static_ptr,
        weight_ptr,
        weight_scales_ptr,
        bias_ptr,
        pair,
        row_mask,
        expert,
        column,
        column_mask,
        num_outputs,
        num_inputs,
        FORM,
        GROUP,
        STATIC,
        ROUND,
        HAS_BIAS,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    total = total * tl.load(pair_weights_ptr + pair, mask=row_mask, other=0.0)[:, None]
    tl.store(
        pairs_ptr + pair[:, None] * num_outputs + column[None, :], total, mask=row_mask[:, None] & column_mask[None, :]
    )
    if arrive(arrived_ptr + tile_n, tl.sum(row_mask.to(tl.int32), axis=0), num_held_pairs):
        sum_tokens(pairs_ptr, out_ptr, experts_ptr, column, num_pairs, first_expert, num_held, num_outputs, K, BLOCK_M)


@triton.jit
def expert_tile(
    x_ptr,  # [*, num_inputs]
    static_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    row,  # [BLOCK_M] int64, of x
    row_mask,
    expert,  # int64
    column,  # [BLOCK_N], of the expert's outputs, in any order
    column_mask,
    num_outputs,
    num_inputs,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    STATIC: tl.constexpr,
    ROUND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x @ weight.T + bias of these rows and columns, [BLOCK_M, BLOCK_N] float32."""
    if FORM == "fp4":
        total = fp4_tile(
            x_ptr,
            weight_ptr,
            scales_ptr,
            row,
            row_mask,
            num_inputs,
            expert,
            column,
            column_mask,
            num_outputs,
            num_inputs,
            0,
            num_inputs,
            BLOCK_M,
            BLOCK_N,
        )
    elif FORM == "packed int4" or FORM == "packed int8":
        total = int_tile(
            x_ptr,
            weight_ptr,
            scales_ptr,
            row,
            row_mask,
            num_inputs,
            expert,
            column,
            column_mask,
            num_outputs,
            num_inputs,
            4 if FORM == "packed int4" else 8,
            GROUP,
            BLOCK_M,
            BLOCK_N,
        )
    else:
        inner = tl.arange(0, BLOCK_K)
        x_place = x_ptr + row[:, None] * num_inputs + inner[None, :]
        weight_place = weight_ptr + expert * num_outputs * num_inputs + (column[None, :] * num_inputs + inner[:, None])
        x_scale = tl.zeros([BLOCK_M], tl.float32)
        factor = x_scale
        if FORM == "fp8 by row":
            if STATIC:
                x_scale += tl.load(static_ptr)
                factor += tl.div_rn(1.0, tl.load(static_ptr))
            else:
                most = largest_of_rows(x_place, row_mask, inner, num_inputs, BLOCK_M, BLOCK_K)
                x_scale, factor = tl.div_rn(most, 448.0), tl.div_rn(448.0, most)
        if FORM == "fp8 by block":
            num_groups = num_inputs // BLOCK_K
            scales_ptr += expert * tl.cdiv(num_outputs, BLOCK_K) * num_groups
        if FORM == "int8 by row":
            if STATIC:
                x_scale += tl.load(static_ptr)
            else:
                most = largest_of_rows(x_place, row_mask, inner, num_inputs, BLOCK_M, BLOCK_K)
                x_scale = tl.div_rn(most, 127.5)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if FORM == "int8 by row" else tl.float32)
        for start in range(0, num_inputs, BLOCK_K):
            inner_mask = start + inner < num_inputs
            x = tl.load(x_place + start, mask=row_mask[:, None] & inner_mask[None, :], other=0.0)
            weight = tl.load(weight_place + start, mask=column_mask[None, :] & inner_mask[:, None], other=0.0)
            if FORM == "floats":
                total = tl.dot(x, weight, total, input_precision="ieee")
            elif FORM == "fp8 by row":
                total = tl.dot(to_fp8(x.to(tl.float32) * factor[:, None], ROUND), weight, total)
            elif FORM == "int8 by row":
                quantized = round_to_int8(tl.div_rn(x.to(tl.float32), x_scale[:, None]))
                total = tl.dot(quantized, weight, total, out_dtype=tl.int32)
            else:
                most = tl.maximum(tl.max(tl.abs(x.to(tl.float32)), axis=1), 1e-10)
                quantized = to_fp8(x.to(tl.float32) * tl.div_rn(448.0, most)[:, None], ROUND)
                group = column // BLOCK_K * num_groups + start // BLOCK_K
                weight_scale = tl.load(scales_ptr + group, mask=column_mask, other=0.0)
                total += tl.dot(quantized, weight) * (tl.div_rn(most, 448.0)[:, None] * weight_scale[None, :])
        if FORM == "fp8 by row" or FORM == "int8 by row":
            weight_scale = tl.load(scales_ptr + expert * num_outputs + column, mask=column_mask, other=0.0)
            total = total.to(tl.float32) * x_scale[:, None] * weight_scale[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * num_outputs + column, mask=column_mask, other=0.0)
        total += bias.to(tl.float32)[None, :]
    return total


@triton.jit
def largest_of_rows(x_place, row_mask, inner, num_inputs, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """The largest of each row's absolute values, [BLOCK_M], at least the smallest of a row that is quantized."""
    most = tl.full([BLOCK_M], 1e-10, tl.float32)
    for start in range(0, num_inputs, BLOCK_K):
        mask = row_mask[:, None] & (start + inner < num_inputs)[None, :]
        x = tl.load(x_place + start, mask=mask, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.max(tl.abs(x), axis=1))
    return most
