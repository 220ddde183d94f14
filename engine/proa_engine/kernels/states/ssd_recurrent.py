"""The state space of Mamba2 token by token (Dao and Gu 2024, arXiv 2405.21060).

For each head, with the state S [head_dim, state_size] and B and C of the head's group:
    step = clamp(softplus(dt + dt_bias));  S = exp(-exp(A_log) * step) * S + step * x Bᵀ;  out = S C + D * x

On a CPU everything is computed in float32 by elementwise operations and sums over the last dimension, so a token's bits
depend neither on the other rows of the batch nor on how its row was cut into steps.

On a GPU: decodes, rows with drafts, and every row in batch-invariant mode. A program computes BLOCK_P rows of one
head's state for one row of the batch. It holds them in registers in float32 and writes them once a segment. With drafts
it first computes the row's pending tokens again. Grid: (rows, heads, blocks of head_dim).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from proa_engine.kernels.launch import begin, cdiv, kernel, next_power_of_2
from proa_engine.kernels.states.state_rows import (
    NO_PENDING,
    NO_REPLAY,
    NoPendingInputs,
    NoReplay,
    PendingInputs,
    Replay,
    StatePlan,
    StateRows,
    read_states,
)

MAX_BLOCK_P = 32


@dataclass(frozen=True, eq=False)  # without slots: `parameters()` of a model finds tensors by `vars`
class SsdWeights:
    a_log: torch.Tensor  # [heads] float32, as are the others
    dt_bias: torch.Tensor
    d: torch.Tensor
    limit: tuple[float, float]  # least and greatest step


def ssd_reference(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    weights: SsdWeights,
    cache: torch.Tensor,
    pending: PendingInputs | NoPendingInputs,
    plan: StatePlan,
) -> torch.Tensor:
    """Arguments as those of `ssd`."""
    _, num_heads, head_dim, state_size = cache.shape
    num_own, width = len(xbc), num_heads * head_dim
    xbc, dt = pending.behind(xbc, dt)
    num_tokens = len(xbc)
    inputs = xbc[plan.token_order].float()
    group_width = (inputs.shape[1] - width) // 2
    x, b, c = inputs.split((width, group_width, group_width), dim=1)
    by_group = group_width // state_size, num_heads * state_size // group_width  # groups, heads of each
    x = x.view(num_tokens, *by_group, head_dim)
    # [T, groups, 1, 1, state_size] for products with states
    b, c = (each.view(num_tokens, -1, 1, 1, state_size) for each in (b, c))
    steps = time_steps(dt[plan.token_order].float(), weights)
    decay = (steps * -weights.a_log.exp()).exp_().view(num_tokens, *by_group, 1, 1)
    change = (x * steps.view(num_tokens, *by_group, 1))[..., None]

    read = read_states(cache, plan)
    states = read.view(len(read), *by_group, head_dim, state_size)
    products = torch.empty_like(states)
    out = torch.empty_like(x)
    if -1 in plan.cuts:
        plan.cuts[-1].write(read, cache)
    start = 0
    for step, num_rows in enumerate(plan.row_counts):
        tokens = slice(start, start + num_rows)
        start += num_rows
        state, product = states[:num_rows], products[:num_rows]
        state.mul_(decay[tokens]).add_(torch.mul(change[tokens], b[tokens], out=product))
        torch.sum(torch.mul(state, c[tokens], out=product), -1, out=out[tokens])
        if step in plan.cuts:
            plan.cuts[step].write(read, cache)
    out += x * weights.d.view(*by_group, 1)
    result = torch.empty(num_tokens, width, dtype=xbc.dtype)
    result[plan.token_order] = out.view(num_tokens, width).to(xbc.dtype)
    return result[:num_own]


def time_steps(dt: torch.Tensor, weights: SsdWeights) -> torch.Tensor:
    """dt [T, heads] float32 -> [T, heads]. Computed with exp and log1p, for the reason given in `step_gates`."""
    shifted = dt + weights.dt_bias
    softplus = shifted.clamp(min=0) + shifted.abs().neg_().exp_().log1p_()
    return softplus.clamp_(*weights.limit)


def ssd_recurrent(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    weights: SsdWeights,
    cache: torch.Tensor,
    out: torch.Tensor,
    rows: StateRows,
    query_start_loc: torch.Tensor,
    first_row: int,
    num_rows: int,
    *,
    one_token: bool,
    replay: Replay | NoReplay = NO_REPLAY,
    pending: PendingInputs | NoPendingInputs = NO_PENDING,
) -> None:
    """Write out [T, heads * head_dim] and states of `num_rows` rows from `first_row` on.

    Arguments as those of `ssd`. `one_token`: these rows have one token each. `replay` and `pending`: what these rows,
    the first ones, compute again.
    """
    _, num_heads, head_dim, state_size = cache.shape
    assert xbc.stride(1) == dt.stride(1) == 1
    assert cache.is_contiguous()
    assert out.is_contiguous()
    block_p = min(MAX_BLOCK_P, next_power_of_2(head_dim))
    ssd_recurrent_kernel[(num_rows, num_heads, cdiv(head_dim, block_p))](
        xbc,
        dt,
        weights.a_log,
        weights.dt_bias,
        weights.d,
        cache,
        out,
        pending.convolved,
        pending.beside,
        query_start_loc,
        rows.read,
        rows.write,
        rows.first_segments,
        rows.segment_start_loc,
        replay.num_pending,
        replay.num_kept,
        replay.starts,
        first_row,
        xbc.stride(0),
        dt.stride(0),
        *weights.limit,
        NUM_HEADS=num_heads,
        NUM_GROUPS=(xbc.shape[1] - num_heads * head_dim) // (2 * state_size),
        HEAD_DIM=head_dim,
        STATE_SIZE=state_size,
        BLOCK_P=block_p,
        BLOCK_N=next_power_of_2(state_size),
        WIDTH=replay.width,
        ONE_TOKEN=one_token,
        num_warps=4,
    )


@triton.jit
def time_step(dt, dt_bias, least, greatest):
    """clamp(softplus(dt + dt_bias)), in float32"""
    shifted = dt + dt_bias
    softplus = tl.maximum(shifted, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(shifted)))
    return tl.minimum(tl.maximum(softplus, least), greatest)


@kernel(
    do_not_specialize=["first_row"], do_not_specialize_on_alignment=["num_pending_ptr", "num_kept_ptr", "starts_ptr"]
)
def ssd_recurrent_kernel(
    xbc_ptr,  # [num_tokens, NUM_HEADS * HEAD_DIM + 2 * NUM_GROUPS * STATE_SIZE]
    dt_ptr,  # [num_tokens, NUM_HEADS]
    a_log_ptr,  # [NUM_HEADS] float32
    dt_bias_ptr,  # [NUM_HEADS] float32
    d_ptr,  # [NUM_HEADS] float32
    cache_ptr,  # [slots, NUM_HEADS, HEAD_DIM, STATE_SIZE] float32
    out_ptr,  # [num_tokens, NUM_HEADS * HEAD_DIM]
    pending_xbc_ptr,  # [rows, WIDTH, …] as `xbc_ptr`; this and the other four of pending tokens: None if WIDTH is 0
    pending_dt_ptr,  # [rows, WIDTH, NUM_HEADS]
    query_start_loc_ptr,  # [rows + 1]
    read_ptr,  # [rows]
    write_ptr,  # [segments]
    first_segments_ptr,  # [rows + 1]
    segment_start_loc_ptr,  # [segments + 1]
    num_pending_ptr,  # [rows]
    num_kept_ptr,  # [rows]
    starts_ptr,  # [rows]
    first_row,
    stride_xbc_token,
    stride_dt_token,
    least_step,
    greatest_step,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,  # most pending tokens of a row; then each row has one segment
    ONE_TOKEN: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = first_row + tl.program_id(0)
    head = tl.program_id(1)
    group = head // (NUM_HEADS // NUM_GROUPS)
    state_index = tl.arange(0, BLOCK_N)
    value_index = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    state_mask = state_index < STATE_SIZE
    value_mask = value_index < HEAD_DIM
    # [BLOCK_P, BLOCK_N]
    mask = value_mask[:, None] & state_mask[None, :]
    place = (head * HEAD_DIM + value_index)[:, None] * STATE_SIZE + state_index[None, :]
    slot = tl.load(read_ptr + row).to(tl.int64)
    state = tl.load(cache_ptr + slot * (NUM_HEADS * HEAD_DIM * STATE_SIZE) + place, mask=mask & (slot >= 0), other=0.0)
    rate = -tl.exp(tl.load(a_log_ptr + head))
    dt_bias = tl.load(dt_bias_ptr + head)
    skip = tl.load(d_ptr + head)
    out_place = out_ptr + head * HEAD_DIM + value_index
    if WIDTH:  # two parts instead of segments: the pending tokens, then the row's own
        segment = 0
        end_segment = 2
        num_kept = tl.load(num_kept_ptr + row)
        row_start = tl.load(query_start_loc_ptr + row).to(tl.int64)
        padding_place = out_place + row_start * (NUM_HEADS * HEAD_DIM)
        for _ in range(row_start, tl.load(starts_ptr + row)):
            tl.store(padding_place, tl.zeros([BLOCK_P], tl.float32), mask=value_mask)
            padding_place += NUM_HEADS * HEAD_DIM
    elif ONE_TOKEN:
        segment = row
        end_segment = row + 1
    else:
        segment = tl.load(first_segments_ptr + row)
        end_segment = tl.load(first_segments_ptr + row + 1)
    while segment < end_segment:
        slot = tl.load(write_ptr + (row if WIDTH else segment)).to(tl.int64)
        is_written = slot >= 0
        is_out = value_mask
        tokens_ptr = xbc_ptr
        tokens_dt_ptr = dt_ptr
        stride = stride_xbc_token
        stride_dt = stride_dt_token
        if WIDTH:
            is_own = segment == 1
            is_written = is_written & ((num_kept == 0) == is_own)
            is_out = is_out & is_own
            tokens_ptr = tl.where(is_own, xbc_ptr, pending_xbc_ptr)
            tokens_dt_ptr = tl.where(is_own, dt_ptr, pending_dt_ptr)
            stride = tl.where(is_own, stride, NUM_HEADS * HEAD_DIM + 2 * NUM_GROUPS * STATE_SIZE)
            stride_dt = tl.where(is_own, stride_dt, NUM_HEADS)
            first = row.to(tl.int64) * WIDTH
            token = tl.where(is_own, tl.load(starts_ptr + row).to(tl.int64), first)
            end = tl.load(query_start_loc_ptr + row + 1).to(tl.int64)
            end = tl.where(is_own, end, first + tl.load(num_pending_ptr + row))
        elif ONE_TOKEN:
            token = row.to(tl.int64)
            end = token + 1
        else:
            token = tl.load(segment_start_loc_ptr + segment).to(tl.int64)
            end = tl.load(segment_start_loc_ptr + segment + 1).to(tl.int64)
        while token < end:
            x_place = tokens_ptr + token * stride + head * HEAD_DIM
            b_place = tokens_ptr + token * stride + (NUM_HEADS * HEAD_DIM + group * STATE_SIZE)
            x = tl.load(x_place + value_index, mask=value_mask, other=0.0).to(tl.float32)
            b = tl.load(b_place + state_index, mask=state_mask, other=0.0).to(tl.float32)
            c = tl.load(b_place + NUM_GROUPS * STATE_SIZE + state_index, mask=state_mask, other=0.0).to(tl.float32)
            dt = tl.load(tokens_dt_ptr + token * stride_dt + head).to(tl.float32)
            step = time_step(dt, dt_bias, least_step, greatest_step)
            state = state * tl.exp(rate * step) + (x * step)[:, None] * b[None, :]
            result = tl.sum(state * c[None, :], axis=1) + x * skip
            tl.store(out_place + token * (NUM_HEADS * HEAD_DIM), result, mask=is_out)
            token += 1
        tl.store(cache_ptr + slot * (NUM_HEADS * HEAD_DIM * STATE_SIZE) + place, state, mask=mask & is_written)
        segment += 1
