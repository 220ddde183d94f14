"""The short convolution of a batch's first rows in an engine with drafts: pending tokens again, then the rows' own.

A program computes all tokens of one row, at most twice `Replay.width`, for a block of channels. It alone reads and
writes these channels of the row's state and of its kept inputs, so pending ones can be overwritten in place. The first
block of a row also exchanges what is kept beside the convolution's inputs.
"""

from collections.abc import Sequence

import torch
import triton.language as tl

from proa_engine.kernels.launch import begin, cdiv, kernel, next_power_of_2
from proa_engine.kernels.states.conv_weights import ConvWeights, convolve, load_before, load_weights, store_before
from proa_engine.kernels.states.state_rows import PendingInputs, Replay, StateRows

MAX_BLOCK_C = 256


def short_conv_replay(
    x: torch.Tensor,
    beside: torch.Tensor,
    weights: ConvWeights,
    cache: torch.Tensor,
    kept: Sequence[torch.Tensor],
    query_start_loc: torch.Tensor,
    rows: StateRows,
    replay: Replay,
    out: torch.Tensor,
) -> PendingInputs:
    """Write out [T, C] and states of the first `replay.num_rows` rows; padding gets zeros. Arguments as those of
    `short_conv`."""
    num_channels, num_beside = x.shape[1], beside.shape[1]
    num_pending = replay.num_rows * replay.width
    pending = PendingInputs(
        torch.empty(num_pending, num_channels, dtype=x.dtype, device=x.device),
        torch.empty(num_pending, num_beside, dtype=beside.dtype, device=x.device),
    )
    kept_x, kept_beside = kept
    assert x.stride(1) == beside.stride(1) == 1
    assert all(each.is_contiguous() for each in (cache, kept_x, kept_beside))
    assert kept_x.shape[1] == replay.width
    block_c = min(MAX_BLOCK_C, next_power_of_2(num_channels))
    short_conv_replay_kernel[(replay.num_rows, cdiv(num_channels, block_c))](
        x,
        beside,
        weights.weight,
        weights.bias,
        cache,
        kept_x,
        kept_beside,
        out,
        pending.convolved,
        pending.beside,
        query_start_loc,
        rows.read,
        rows.write,
        replay.slots,
        replay.num_pending,
        replay.num_kept,
        replay.starts,
        x.stride(0),
        beside.stride(0),
        CHANNELS=num_channels,
        BESIDE=num_beside,
        WIDTH=replay.width,
        **weights.constants,
        BLOCK_C=block_c,
        BLOCK_B=next_power_of_2(max(num_beside, 1)),
        num_warps=4,
    )
    return pending


@kernel(
    do_not_specialize_on_alignment=[
        "read_ptr",
        "write_ptr",
        "slots_ptr",
        "num_pending_ptr",
        "num_kept_ptr",
        "starts_ptr",
    ]
)
def short_conv_replay_kernel(
    x_ptr,  # [num_tokens, CHANNELS]
    beside_ptr,  # [num_tokens, BESIDE]
    weight_ptr,  # [CHANNELS, BEFORE + 1]
    bias_ptr,  # [CHANNELS]; None unless HAS_BIAS
    cache_ptr,  # [slots, CHANNELS, BEFORE]
    kept_x_ptr,  # [requests, WIDTH, CHANNELS]
    kept_beside_ptr,  # [requests, WIDTH, BESIDE]
    out_ptr,  # [num_tokens, CHANNELS]
    pending_out_ptr,  # [num_rows, WIDTH, CHANNELS]
    pending_beside_ptr,  # [num_rows, WIDTH, BESIDE]
    query_start_loc_ptr,  # [num_rows + 1]
    read_ptr,  # [num_rows]
    write_ptr,  # [num_rows]: each of these rows has one segment
    slots_ptr,  # [num_rows]
    num_pending_ptr,  # [num_rows]
    num_kept_ptr,  # [num_rows]
    starts_ptr,  # [num_rows]
    stride_x_token,
    stride_beside_token,
    CHANNELS: tl.constexpr,
    BESIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BEFORE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = channel < CHANNELS
    num_pending = tl.load(num_pending_ptr + row)
    num_kept = tl.load(num_kept_ptr + row)
    first_kept = tl.load(slots_ptr + row).to(tl.int64) * WIDTH
    start = tl.load(starts_ptr + row)
    end = tl.load(query_start_loc_ptr + row + 1)

    third_weight, second_weight, latest_weight, own_weight, bias = load_weights(
        weight_ptr, bias_ptr, channel, mask, BEFORE, HAS_BIAS
    )
    slot = tl.load(read_ptr + row).to(tl.int64)
    place = cache_ptr + (slot * CHANNELS + channel) * BEFORE
    third, second, latest = load_before(place, 1, mask & (slot >= 0), BEFORE)
    third = third.to(tl.float32)
    second = second.to(tl.float32)
    latest = latest.to(tl.float32)
    kept_place = kept_x_ptr + first_kept * CHANNELS + channel
    out_place = pending_out_ptr + row * (WIDTH * CHANNELS) + channel
    for index in range(0, num_pending):
        own = tl.load(kept_place + index * CHANNELS, mask=mask, other=0.0).to(tl.float32)
        total = convolve(own, latest, second, third, own_weight, latest_weight, second_weight, third_weight, bias, SILU)
        tl.store(out_place + index * CHANNELS, total, mask=mask)
        third = second
        second = latest
        latest = own
    tl.debug_barrier()  # the state and the kept inputs that are overwritten have been read by all threads
    slot = tl.load(write_ptr + row).to(tl.int64)
    place = cache_ptr + (slot * CHANNELS + channel) * BEFORE
    is_written = mask & (slot >= 0)
    if num_kept > 0:
        store_before(place, third, second, latest, is_written, BEFORE)
    row_start = tl.load(query_start_loc_ptr + row)
    out_place = out_ptr + row_start.to(tl.int64) * CHANNELS + channel
    for _ in range(row_start, start):
        tl.store(out_place, tl.zeros([BLOCK_C], tl.float32), mask=mask)
        out_place += CHANNELS
    x_place = x_ptr + start.to(tl.int64) * stride_x_token + channel
    for _ in range(start, end):
        own = tl.load(x_place, mask=mask, other=0.0).to(tl.float32)
        tl.store(kept_place, own, mask=mask & (num_kept > 0))
        total = convolve(own, latest, second, third, own_weight, latest_weight, second_weight, third_weight, bias, SILU)
        tl.store(out_place, total, mask=mask)
        x_place += stride_x_token
        kept_place += CHANNELS
        out_place += CHANNELS
        third = second
        second = latest
        latest = own
    if num_kept == 0:
        store_before(place, third, second, latest, is_written, BEFORE)
    if tl.program_id(1) == 0:
        column = tl.arange(0, BLOCK_B)
        kept_values = kept_beside_ptr + first_kept * BESIDE + column
        pending_place = pending_beside_ptr + row * (WIDTH * BESIDE) + column
        for index in range(0, num_pending):
            values = tl.load(kept_values + index * BESIDE, mask=column < BESIDE)
            tl.store(pending_place + index * BESIDE, values, mask=column < BESIDE)
        tl.debug_barrier()
        beside_place = beside_ptr + start.to(tl.int64) * stride_beside_token + column
        for _ in range(0, num_kept):
            tl.store(kept_values, tl.load(beside_place, mask=column < BESIDE), mask=column < BESIDE)
            beside_place += stride_beside_token
            kept_values += BESIDE
