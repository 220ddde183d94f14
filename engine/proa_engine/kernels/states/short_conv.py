"""Causal depthwise convolution of kernel size 3 or 4 over each row's tokens, with a bias and then SiLU if wanted: the
short convolution of gated delta nets (Yang et al. 2024, arXiv 2412.06464), Mamba2 and LFM2.

A row continues from its state, the last two or three inputs before it. A program of the Triton kernel computes BLOCK_T
tokens of one row and a block of channels. The first program of a row also writes the states at the ends of its
segments, since only it reads the state that one of them may overwrite.
"""

from collections.abc import Sequence

import torch
import triton.language as tl

from proa_engine.kernels.attention.prefill_attention import find_request
from proa_engine.kernels.launch import begin, cdiv, kernel, next_power_of_2
from proa_engine.kernels.states.conv_weights import ConvWeights, convolve, load_before, load_weights
from proa_engine.kernels.states.short_conv_replay import MAX_BLOCK_C, short_conv_replay
from proa_engine.kernels.states.state_rows import (
    NO_PENDING,
    NoPendingInputs,
    NoReplay,
    PendingInputs,
    Replay,
    StatePlan,
    StateRows,
    read_states,
)

BLOCK_T = 32


def short_conv(
    x: torch.Tensor,
    beside: torch.Tensor,
    weights: ConvWeights,
    cache: torch.Tensor,
    kept: Sequence[torch.Tensor],
    query_start_loc: torch.Tensor,
    rows: StateRows,
    *,
    num_decodes: int,
    plan: StatePlan | None,
) -> tuple[torch.Tensor, PendingInputs | NoPendingInputs]:
    """x [T, C] -> [T, C]; writes the states at the ends of segments to `cache` [slots, C, K - 1], K the kernel size.

    Also returns what the operations behind it compute again, by `rows.replay`. `beside` [T, B] is what these read of
    each token beside the convolution's output. Inputs are kept in `kept`, [slots, width, C] of x and [slots, width, B]
    of `beside`.

    `query_start_loc` and `num_decodes` as in `AttentionMetadata`; `plan` is set on a CPU.
    """
    if plan is not None:
        return short_conv_reference(x, beside, weights, cache, kept, plan)
    num_tokens, num_channels = x.shape
    num_rows, first_row = rows.read.shape[0], rows.replay.num_rows
    pending: PendingInputs | NoPendingInputs = NO_PENDING
    out = torch.empty(num_tokens, num_channels, dtype=x.dtype, device=x.device)
    if isinstance(rows.replay, Replay):
        pending = short_conv_replay(x, beside, weights, cache, kept, query_start_loc, rows, rows.replay, out)
    if first_row == num_rows:
        return out, pending
    one_token = num_decodes == num_rows
    assert x.stride(1) == 1
    assert cache.is_contiguous()
    block_c = min(MAX_BLOCK_C, next_power_of_2(num_channels))
    blocks = num_rows if one_token else num_tokens // BLOCK_T + num_rows - first_row
    short_conv_kernel[(blocks, cdiv(num_channels, block_c))](
        x,
        weights.weight,
        weights.bias,
        cache,
        out,
        query_start_loc,
        rows.read,
        rows.write,
        rows.first_segments,
        rows.segment_start_loc,
        first_row,
        num_rows - first_row,
        x.stride(0),
        CHANNELS=num_channels,
        **weights.constants,
        BLOCK_T=BLOCK_T,
        BLOCK_C=block_c,
        ONE_TOKEN=one_token,
        num_warps=4,
    )
    return out, pending


def short_conv_reference(
    x: torch.Tensor,
    beside: torch.Tensor,
    weights: ConvWeights,
    cache: torch.Tensor,
    kept: Sequence[torch.Tensor],
    plan: StatePlan,
) -> tuple[torch.Tensor, PendingInputs | NoPendingInputs]:
    """A token's bits depend only on its inputs: products are added in one order, and exp is used as by
    `activate_and_mul_reference`."""
    if isinstance(plan.replay, NoReplay):
        return _convolve(x, weights, cache, plan), NO_PENDING
    kept_x, kept_beside = kept
    out = _convolve(torch.cat((x, plan.replay.exchange(x, kept_x))), weights, cache, plan)
    return out[: len(x)], PendingInputs(out[len(x) :], plan.replay.exchange(beside, kept_beside))


def _convolve(x: torch.Tensor, weights: ConvWeights, cache: torch.Tensor, plan: StatePlan) -> torch.Tensor:
    """x [N, C] -> [N, C], of the plan's tokens."""
    inputs = torch.empty(len(x) + plan.conv_states.numel(), x.shape[1], dtype=x.dtype)
    inputs[plan.conv_inputs] = x
    inputs[plan.conv_states] = read_states(cache, plan).transpose(1, 2)
    own, *before = reversed(weights.weight.float().unbind(1))
    total = inputs[plan.conv_inputs].float() * own
    for distance, weight in enumerate(before, start=1):
        total += inputs[plan.conv_inputs - distance].float() * weight
    if weights.bias is not None:
        total += weights.bias.float()
    cache[plan.conv_slots] = inputs[plan.conv_ends].transpose(1, 2)
    return (torch.div(total, total.neg().exp_().add_(1)) if weights.silu else total).to(x.dtype)


@kernel(do_not_specialize=["first_row", "num_rows"])
def short_conv_kernel(
    x_ptr,  # [num_tokens, CHANNELS]
    weight_ptr,  # [CHANNELS, BEFORE + 1]
    bias_ptr,  # [CHANNELS]; None unless HAS_BIAS
    cache_ptr,  # [slots, CHANNELS, BEFORE]
    out_ptr,  # [num_tokens, CHANNELS]
    query_start_loc_ptr,  # [first_row + num_rows + 1]
    read_ptr,  # [first_row + num_rows]
    write_ptr,  # [segments]
    first_segments_ptr,  # [first_row + num_rows + 1]
    segment_start_loc_ptr,  # [segments + 1]
    first_row,
    num_rows,
    stride_x_token,
    CHANNELS: tl.constexpr,
    BEFORE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ONE_TOKEN: tl.constexpr,  # every row has one token
    PDL: tl.constexpr,
):
    begin(PDL)
    block = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = channel < CHANNELS
    if ONE_TOKEN:
        row = block
        start = block
        length = 1
        first = 0
    else:
        starts_ptr = query_start_loc_ptr + first_row
        row = find_request(starts_ptr, block, num_rows, BLOCK_T)
        start = tl.load(starts_ptr + row)
        length = tl.load(starts_ptr + row + 1) - start
        first = (block - (start - tl.load(starts_ptr)) // BLOCK_T - row) * BLOCK_T
        row += first_row
        if first >= length:  # the grid is an upper bound
            return
    x_row = x_ptr + start.to(tl.int64) * stride_x_token + channel
    slot = tl.load(read_ptr + row).to(tl.int64)
    state_mask = mask & (first == 0) & (slot >= 0)
    third, second, latest = load_before(cache_ptr + (slot * CHANNELS + channel) * BEFORE, 1, state_mask, BEFORE)
    input_mask = mask & (first > 0)
    before = x_row + (first - BEFORE) * stride_x_token
    third_input, second_input, latest_input = load_before(before, stride_x_token, input_mask, BEFORE)
    third += third_input
    second += second_input
    latest += latest_input
    if first == 0:
        tl.debug_barrier()  # a state that is overwritten has been read by all threads
        if ONE_TOKEN:
            first_segment = row
            end_segment = row + 1
        else:
            first_segment = tl.load(first_segments_ptr + row)
            end_segment = tl.load(first_segments_ptr + row + 1)
        for segment in range(first_segment, end_segment):
            end = length
            if not ONE_TOKEN:
                end = tl.load(segment_start_loc_ptr + segment + 1) - start
            slot = tl.load(write_ptr + segment).to(tl.int64)
            last = x_row + (end - 1) * stride_x_token
            is_written = mask & (slot >= 0)
            place = cache_ptr + (slot * CHANNELS + channel) * BEFORE
            if BEFORE == 3:
                old = tl.where(end == 1, second, tl.where(end == 2, latest, third))
                new = tl.load(last - 2 * stride_x_token, mask=is_written & (end > 2), other=0.0)
                tl.store(place, tl.where(end > 2, new, old), mask=is_written)
            new = tl.load(last - stride_x_token, mask=is_written & (end > 1), other=0.0)
            tl.store(place + (BEFORE - 2), tl.where(end > 1, new, latest), mask=is_written)
            tl.store(place + (BEFORE - 1), tl.load(last, mask=is_written, other=0.0), mask=is_written)
    third_weight, second_weight, latest_weight, own_weight, bias = load_weights(
        weight_ptr, bias_ptr, channel, mask, BEFORE, HAS_BIAS
    )
    third = third.to(tl.float32)
    second = second.to(tl.float32)
    latest = latest.to(tl.float32)
    out_place = out_ptr + (start + first).to(tl.int64) * CHANNELS + channel
    x_place = x_row + first * stride_x_token
    for _ in range(first, tl.minimum(first + BLOCK_T, length)):
        own = tl.load(x_place, mask=mask, other=0.0).to(tl.float32)
        total = convolve(own, latest, second, third, own_weight, latest_weight, second_weight, third_weight, bias, SILU)
        tl.store(out_place, total, mask=mask)
        x_place += stride_x_token
        out_place += CHANNELS
        third = second
        second = latest
        latest = own
