"""Thresholds of top-k, top-p and min-p: the least logit of each row that may be sampled, found by pivots, without
sorting.

The logit of rank k, and the one at which the largest probabilities sum to p, are found by search. Floats of one sign
order like integers, so each pass over the row counts (or sums) what lies above each of PIVOTS points and narrows an
interval of integers. A row of 16-bit logits has at most 2^16 values: 7 passes.

Grid: rows. Programs of rows without limits return at once.
"""

import torch
import triton
import triton.language as tl

from proa_engine.kernels.launch import kernel
from proa_engine.kernels.sampling import sampling_params as columns
from proa_engine.kernels.sampling import sampling_reference as sampling

PIVOTS = 4
BLOCK = 8192
# Low bits of a float32 that are zero in the narrower types.
UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


def token_limits(logits: torch.Tensor, params: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """logits [rows, vocab] -> thresholds [rows] float32: a row's token is chosen among its logits >= its threshold.

    Row r uses row slots[r] of `params`: min-p, then top-k, then top-p of the probabilities at the row's temperature.
    Tokens that equal the last one kept are kept too. A greedy row has no limits.
    """
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    thresholds = torch.empty(rows, dtype=torch.float32, device=logits.device)
    token_limits_kernel[(rows,)](
        logits,
        params,
        slots,
        thresholds,
        vocab_size,
        logits.stride(0),
        TEMPERATURE=columns.TEMPERATURE,
        MIN_P=columns.MIN_P,
        TOP_K=columns.TOP_K,
        TOP_P=columns.TOP_P,
        NUM_COLUMNS=columns.NUM_COLUMNS,
        MIN_TEMPERATURE=columns.MIN_TEMPERATURE,
        UNUSED_BITS=UNUSED_BITS[logits.dtype],
        PIVOTS=PIVOTS,
        BLOCK=BLOCK,
        num_warps=16,
    )
    return thresholds


def token_limits_reference(logits: torch.Tensor, params: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    chosen, logits = params[slots], logits.float()
    temperature = chosen[:, columns.TEMPERATURE].float()
    is_random = temperature >= columns.MIN_TEMPERATURE
    scaled = logits / torch.where(is_random, temperature, 1.0)[:, None]
    sampling.apply_min_p(scaled, chosen[:, columns.MIN_P].float())
    sampling.apply_top_k_top_p(scaled, chosen[:, columns.TOP_K].long(), chosen[:, columns.TOP_P].float())
    thresholds = logits.masked_fill(scaled == -torch.inf, torch.inf).amin(-1)
    return torch.where(is_random, thresholds, -torch.inf)


@triton.jit
def order_of(x, UNUSED_BITS: tl.constexpr):
    """Integers that sort like the floats x, of any shape."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> UNUSED_BITS


@triton.jit
def float_of(order, UNUSED_BITS: tl.constexpr):
    bits = ((order << UNUSED_BITS) | tl.where(order < 0, (1 << UNUSED_BITS) - 1, 0)).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def amount_above(
    row_ptr,
    pivots,  # [PIVOTS, 1] int64
    maximum,
    temperature,
    vocab_size,
    WEIGHS: tl.constexpr,  # the sum of exp((x - maximum) / temperature); else the number
    UNUSED_BITS: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count or sum the row's logits from each pivot on -> [PIVOTS] float32."""
    lane = tl.arange(0, BLOCK)
    # [PIVOTS, BLOCK]: added up across lanes only once
    amounts = tl.zeros([PIVOTS, BLOCK], tl.float32)
    for base in range(0, vocab_size, BLOCK):
        x = tl.load(row_ptr + base + lane, mask=base + lane < vocab_size, other=float("-inf")).to(tl.float32)
        is_above = order_of(x, UNUSED_BITS)[None, :] >= pivots
        if WEIGHS:
            amounts += tl.where(is_above, tl.exp((x - maximum) / temperature)[None, :], 0.0)
        else:
            amounts += tl.where(is_above, 1.0, 0.0)
    return tl.sum(amounts, axis=1)


@triton.jit
def search(
    row_ptr,
    low,  # int64: the amount from here on is enough
    high,  # int64: the amount above this is not
    target,
    maximum,
    temperature,
    vocab_size,
    WEIGHS: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest integer of a logit's order from which on the amount is at least `target`."""
    while low < high:
        step = (high - low) // (PIVOTS + 1) + 1  # the point after the last pivot lies above `high`
        pivots = low + (tl.arange(0, PIVOTS) + 1).to(tl.int64) * step
        amounts = amount_above(
            row_ptr, pivots[:, None], maximum, temperature, vocab_size, WEIGHS, UNUSED_BITS, PIVOTS, BLOCK
        )
        # Amounts decrease from pivot to pivot.
        num_enough = tl.sum(((amounts >= target) & (pivots <= high)).to(tl.int64))
        low += num_enough * step
        high = tl.minimum(high, low + step - 1)
    return low


@kernel(do_not_specialize_on_alignment=["slots_ptr"])
def token_limits_kernel(
    logits_ptr,  # [rows, vocab_size]
    params_ptr,  # [slots, NUM_COLUMNS] float64
    slots_ptr,  # [rows] int64
    thresholds_ptr,  # [rows] float32
    vocab_size,
    stride_logits_row,
    TEMPERATURE: tl.constexpr,
    MIN_P: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    MIN_TEMPERATURE: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    params_ptr += tl.load(slots_ptr + row) * NUM_COLUMNS
    temperature = tl.load(params_ptr + TEMPERATURE).to(tl.float32)
    min_p = tl.load(params_ptr + MIN_P).to(tl.float32)
    top_k = tl.load(params_ptr + TOP_K).to(tl.int32)
    top_p = tl.load(params_ptr + TOP_P).to(tl.float32)
    if (temperature < MIN_TEMPERATURE) | ((min_p <= 0.0) & (top_k >= vocab_size) & (top_p >= 1.0)):
        tl.store(thresholds_ptr + row, float("-inf"))
        return
    row_ptr = logits_ptr + row * stride_logits_row
    lane = tl.arange(0, BLOCK)
    maxima = tl.full([BLOCK], float("-inf"), tl.float32)
    for base in range(0, vocab_size, BLOCK):
        x = tl.load(row_ptr + base + lane, mask=base + lane < vocab_size, other=float("-inf")).to(tl.float32)
        maxima = tl.maximum(maxima, x)
    maximum = tl.max(maxima, axis=0)

    floor = maximum + temperature * tl.log(min_p)  # -inf without min-p
    low = order_of(floor, UNUSED_BITS).to(tl.int64)
    low += (float_of(low, UNUSED_BITS) < floor).to(tl.int64)  # the order was rounded down
    high = order_of(maximum, UNUSED_BITS).to(tl.int64)
    if top_k < vocab_size:
        low = search(
            row_ptr,
            low,
            high,
            top_k.to(tl.float32),
            maximum,
            temperature,
            vocab_size,
            False,
            UNUSED_BITS,
            PIVOTS,
            BLOCK,
        )
    if top_p < 1.0:
        pivots = tl.full([PIVOTS], 0, tl.int64)[:, None] + low
        total = tl.max(
            amount_above(row_ptr, pivots, maximum, temperature, vocab_size, True, UNUSED_BITS, PIVOTS, BLOCK), axis=0
        )
        mass = top_p * total
        low = search(row_ptr, low, high, mass, maximum, temperature, vocab_size, True, UNUSED_BITS, PIVOTS, BLOCK)
    tl.store(thresholds_ptr + row, float_of(low, UNUSED_BITS))
