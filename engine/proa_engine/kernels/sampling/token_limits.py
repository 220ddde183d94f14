"""Thresholds of top-k, top-p and min-p: the least logit of each row that may be sampled, found by pivots, without
sorting.

Two kernels. The first (grid: rows, chunks) reads the logits once: each lane keeps the KEPT largest of its STEPS logits,
and the next one is its bound. So all logits above the largest bound are kept. The second (grid: rows) searches the
threshold among those, if the limits leave out the others; else (a large top-k, a flat distribution with top-p, many
equal logits) in the row itself.

The logit of rank k, and the one at which the largest probabilities sum to p, are found by search. Floats of one sign
order like integers, so each pass counts (or sums) what lies above each of PIVOTS points and narrows an interval of
integers. Logits of 16 bits have at most 2^16 values: 7 passes.

Programs of rows without limits return at once.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from proa_engine.kernels.float_order import float_of, order_of
from proa_engine.kernels.launch import cdiv, kernel, next_power_of_2
from proa_engine.kernels.sampling import sampling_params as columns
from proa_engine.kernels.sampling import sampling_reference as sampling

PIVOTS = 4
BLOCK = 4096
LANES = 512  # of a chunk
STEPS = 32  # logits of a lane, which are LANES apart
KEPT = 3  # of a lane
_COLUMNS: Mapping[str, Any] = dict(
    TEMPERATURE=columns.TEMPERATURE,
    MIN_P=columns.MIN_P,
    TOP_K=columns.TOP_K,
    TOP_P=columns.TOP_P,
    NUM_COLUMNS=columns.NUM_COLUMNS,
    MIN_TEMPERATURE=columns.MIN_TEMPERATURE,
)
# Low bits of a float32 that are zero in the narrower types.
UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


def token_limits(logits: torch.Tensor, params: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """logits [rows, vocab] -> thresholds [rows] float32: a row's token is chosen among its logits >= its threshold.

    Row r uses row slots[r] of `params`: min-p, then top-k, then top-p of the probabilities at the row's temperature.
    Tokens that equal the last one kept are kept too. A greedy row has no limits.
    """
    assert logits.stride(1) == 1
    return search_thresholds(logits, params, slots, *limit_candidates(logits, params, slots))


def limit_candidates(
    logits: torch.Tensor, params: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logits that are kept, [rows, chunks * KEPT * LANES], of the logits' type, -inf where there are fewer,
    and figures [rows, 3, chunks] float32: each chunk's maximum, bound and, for rows with top-p alone, sum of
    exp((logit - maximum) / temperature). Of rows without limits nothing is written."""
    rows, vocab_size = logits.shape
    num_chunks = cdiv(vocab_size, STEPS * LANES)
    candidates = torch.empty(rows, num_chunks * KEPT * LANES, dtype=logits.dtype, device=logits.device)
    figures = torch.empty(rows, 3, num_chunks, dtype=torch.float32, device=logits.device)
    limit_candidates_kernel[(rows, num_chunks)](
        logits,
        params,
        slots,
        candidates,
        figures,
        vocab_size,
        logits.stride(0),
        num_chunks,
        **_COLUMNS,
        STEPS=STEPS,
        LANES=LANES,
        num_warps=4,
    )
    return candidates, figures


def search_thresholds(
    logits: torch.Tensor,
    params: torch.Tensor,
    slots: torch.Tensor,
    candidates: torch.Tensor,
    figures: torch.Tensor,
) -> torch.Tensor:
    """Thresholds [rows] float32, with what `limit_candidates` found. Where a bound is inf, the row is searched."""
    rows, vocab_size = logits.shape
    num_chunks = figures.shape[2]
    thresholds = torch.empty(rows, dtype=torch.float32, device=logits.device)
    token_limits_kernel[(rows,)](
        logits,
        params,
        slots,
        candidates,
        figures,
        thresholds,
        vocab_size,
        logits.stride(0),
        num_chunks,
        candidates.shape[1],
        **_COLUMNS,
        CHUNKS=next_power_of_2(num_chunks),
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
    # A slot that never had a request has a temperature and a top-k of 0.
    top_k = chosen[:, columns.TOP_K].long().clamp(min=1)
    sampling.apply_top_k_top_p(scaled, top_k, chosen[:, columns.TOP_P].float())
    thresholds = logits.masked_fill(scaled == -torch.inf, torch.inf).amin(-1)
    return torch.where(is_random, thresholds, -torch.inf)


@triton.jit
def amount_above(
    row_ptr,
    pivots,  # [PIVOTS, 1] int64
    maximum,
    temperature,
    size,
    WEIGHS: tl.constexpr,  # the sum of exp((x - maximum) / temperature); else the number
    UNUSED_BITS: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count or sum `size` logits from each pivot on -> [PIVOTS] float32."""
    lane = tl.arange(0, BLOCK)
    least = float_of(pivots, UNUSED_BITS)  # compared as floats: of integers of 64 bits this takes three times as long
    # [PIVOTS, BLOCK]: added up across lanes only once
    amounts = tl.zeros([PIVOTS, BLOCK], tl.float32)
    for base in range(0, size, BLOCK):
        x = tl.load(row_ptr + base + lane, mask=base + lane < size, other=float("-inf")).to(tl.float32)
        is_above = x[None, :] >= least
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
    size,
    WEIGHS: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest integer of a logit's order from which on the amount is at least `target`."""
    while low < high:
        step = (high - low) // (PIVOTS + 1) + 1  # the point after the last pivot lies above `high`
        pivots = low + (tl.arange(0, PIVOTS) + 1).to(tl.int64) * step
        amounts = amount_above(row_ptr, pivots[:, None], maximum, temperature, size, WEIGHS, UNUSED_BITS, PIVOTS, BLOCK)
        # Amounts decrease from pivot to pivot.
        num_enough = tl.sum(((amounts >= target) & (pivots <= high)).to(tl.int64))
        low += num_enough * step
        high = tl.minimum(high, low + step - 1)
    return low


@triton.jit
def read_params(
    params_ptr,  # of the row
    TEMPERATURE: tl.constexpr,
    MIN_P: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
):
    temperature = tl.load(params_ptr + TEMPERATURE).to(tl.float32)
    min_p = tl.load(params_ptr + MIN_P).to(tl.float32)
    top_k = tl.load(params_ptr + TOP_K).to(tl.int32)
    top_p = tl.load(params_ptr + TOP_P).to(tl.float32)
    return temperature, min_p, top_k, top_p


@kernel(do_not_specialize_on_alignment=["slots_ptr"])
def limit_candidates_kernel(
    logits_ptr,  # [rows, vocab_size]
    params_ptr,  # [slots, NUM_COLUMNS] float64
    slots_ptr,  # [rows] int64
    candidates_ptr,  # [rows, chunks, 3, LANES]
    figures_ptr,  # [rows, 3, chunks] float32
    vocab_size,
    stride_logits_row,
    num_chunks,
    TEMPERATURE: tl.constexpr,
    MIN_P: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    MIN_TEMPERATURE: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    params_ptr += tl.load(slots_ptr + row) * NUM_COLUMNS
    temperature, min_p, top_k, top_p = read_params(params_ptr, TEMPERATURE, MIN_P, TOP_K, TOP_P)
    if (temperature < MIN_TEMPERATURE) | ((min_p <= 0.0) & (top_k >= vocab_size) & (top_p >= 1.0)):
        return
    lane = tl.arange(0, LANES)
    row_ptr = logits_ptr + row * stride_logits_row
    start = chunk * STEPS * LANES
    # in descending order
    first = tl.full([LANES], float("-inf"), tl.float32)
    second = first
    third = first
    fourth = first
    for step in tl.range(STEPS, loop_unroll_factor=16):  # so many loads at a time
        place = start + step * LANES + lane
        x = tl.load(row_ptr + place, mask=place < vocab_size, other=float("-inf")).to(tl.float32)
        below_first = tl.minimum(first, x)
        first = tl.maximum(first, x)
        below_second = tl.minimum(second, below_first)
        second = tl.maximum(second, below_first)
        below_third = tl.minimum(third, below_second)
        third = tl.maximum(third, below_second)
        fourth = tl.maximum(fourth, below_third)
    maximum = tl.max(first, axis=0)

    candidates_ptr += (row * num_chunks + chunk) * 3 * LANES + lane
    tl.store(candidates_ptr, first.to(candidates_ptr.dtype.element_ty))
    tl.store(candidates_ptr + LANES, second.to(candidates_ptr.dtype.element_ty))
    tl.store(candidates_ptr + 2 * LANES, third.to(candidates_ptr.dtype.element_ty))
    figures_ptr += row * 3 * num_chunks + chunk
    tl.store(figures_ptr, maximum)
    tl.store(figures_ptr + num_chunks, tl.max(fourth, axis=0))
    if (min_p <= 0.0) & (top_k >= vocab_size):
        masses = tl.zeros([LANES], tl.float32)
        for step in tl.range(STEPS, loop_unroll_factor=16):  # so many loads at a time
            place = start + step * LANES + lane
            x = tl.load(row_ptr + place, mask=place < vocab_size, other=float("-inf")).to(tl.float32)
            masses += tl.where(x > float("-inf"), tl.exp((x - maximum) / temperature), 0.0)
        tl.store(figures_ptr + 2 * num_chunks, tl.sum(masses, axis=0))


@kernel(do_not_specialize_on_alignment=["slots_ptr"])
def token_limits_kernel(
    logits_ptr,  # [rows, vocab_size]
    params_ptr,  # [slots, NUM_COLUMNS] float64
    slots_ptr,  # [rows] int64
    candidates_ptr,  # [rows, num_candidates], of the logits' type
    figures_ptr,  # [rows, 3, chunks] float32
    thresholds_ptr,  # [rows] float32
    vocab_size,
    stride_logits_row,
    num_chunks,
    num_candidates,
    TEMPERATURE: tl.constexpr,
    MIN_P: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    MIN_TEMPERATURE: tl.constexpr,
    CHUNKS: tl.constexpr,  # the next power of two
    UNUSED_BITS: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    params_ptr += tl.load(slots_ptr + row) * NUM_COLUMNS
    temperature, min_p, top_k, top_p = read_params(params_ptr, TEMPERATURE, MIN_P, TOP_K, TOP_P)
    has_top_k = top_k < vocab_size
    if (temperature < MIN_TEMPERATURE) | ((min_p <= 0.0) & (top_k >= vocab_size) & (top_p >= 1.0)):
        tl.store(thresholds_ptr + row, float("-inf"))
        return
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < num_chunks
    figures_ptr += row * 3 * num_chunks + chunk
    maxima = tl.load(figures_ptr, mask=is_chunk, other=float("-inf"))
    bounds = tl.load(figures_ptr + num_chunks, mask=is_chunk, other=float("-inf"))
    maximum = tl.max(maxima, axis=0)
    total = 0.0
    if (min_p <= 0.0) & (not has_top_k):
        masses = tl.load(figures_ptr + 2 * num_chunks, mask=is_chunk, other=0.0)
        total = tl.sum(tl.where(masses > 0.0, masses * tl.exp((maxima - maximum) / temperature), 0.0), axis=0)

    floor = maximum + temperature * tl.log(min_p)  # -inf without min-p
    low = order_of(floor, UNUSED_BITS).to(tl.int64)
    low += (float_of(low, UNUSED_BITS) < floor).to(tl.int64)  # the order was rounded down
    high = order_of(maximum, UNUSED_BITS).to(tl.int64)

    # All logits from here on are among the candidates.
    largest_bound = tl.max(bounds, axis=0)
    bound = order_of(largest_bound, UNUSED_BITS).to(tl.int64) + 1
    row_candidates_ptr = candidates_ptr + row * num_candidates
    is_covered = (low >= bound) | (largest_bound == float("-inf"))
    if (not is_covered) & (bound <= high):
        pivots = tl.full([PIVOTS], 0, tl.int64)[:, None] + bound
        if has_top_k:
            amounts = amount_above(
                row_candidates_ptr, pivots, maximum, temperature, num_candidates, False, UNUSED_BITS, PIVOTS, BLOCK
            )
            is_covered = tl.max(amounts, axis=0) >= top_k
        elif min_p <= 0.0:
            amounts = amount_above(
                row_candidates_ptr, pivots, maximum, temperature, num_candidates, True, UNUSED_BITS, PIVOTS, BLOCK
            )
            is_covered = tl.max(amounts, axis=0) >= top_p * total
    source_ptr = logits_ptr + row * stride_logits_row
    if is_covered:
        source_ptr = row_candidates_ptr
    size = tl.where(is_covered, num_candidates, vocab_size)
    low = tl.where(is_covered & (largest_bound > float("-inf")), tl.maximum(low, bound), low)

    if has_top_k:
        low = search(
            source_ptr,
            low,
            high,
            top_k.to(tl.float32),
            maximum,
            temperature,
            size,
            False,
            UNUSED_BITS,
            PIVOTS,
            BLOCK,
        )
    if top_p < 1.0:
        if has_top_k | (min_p > 0.0):
            pivots = tl.full([PIVOTS], 0, tl.int64)[:, None] + low
            total = tl.max(
                amount_above(source_ptr, pivots, maximum, temperature, size, True, UNUSED_BITS, PIVOTS, BLOCK), axis=0
            )
        mass = top_p * total
        low = search(source_ptr, low, high, mass, maximum, temperature, size, True, UNUSED_BITS, PIVOTS, BLOCK)
    tl.store(thresholds_ptr + row, float_of(low, UNUSED_BITS))
