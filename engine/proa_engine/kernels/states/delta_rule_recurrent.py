"""The gated delta rule token by token (Yang et al. 2024, arXiv 2412.06464, equation 10).

For each value head, with the state S [value_dim, key_dim]:
    S = decay * S;  S += beta * (v - S k) kᵀ;  out = S q
with k and q normalised to length 1, q scaled by key_dim^-0.5, beta = sigmoid(b) and
decay = exp(-exp(A_log) * softplus(a + dt_bias)).

On a CPU everything is computed in float32 by elementwise operations and sums over the last dimension, so a token's bits
depend neither on the other rows of the batch nor on how its row was cut into steps.

On a GPU: decodes, rows with drafts, and every row in batch-invariant mode. A program computes BLOCK_V rows of one
head's state for one row of the batch. It holds them in registers in float32 and writes them once a segment. With drafts
it first computes the row's pending tokens again. Grid: (rows, heads, blocks of value_dim).
"""

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

NORM_EPS = 1e-6

MAX_BLOCK_V = 32


def delta_rule_reference(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cache: torch.Tensor,
    pending: PendingInputs | NoPendingInputs,
    plan: StatePlan,
) -> torch.Tensor:
    """Arguments as those of `gated_delta_rule`."""
    _, num_heads, value_dim, key_dim = cache.shape
    num_own = len(qkv)
    qkv, gates = pending.behind(qkv, gates)
    num_tokens = len(qkv)
    inputs = qkv[plan.token_order].float()
    value_width = num_heads * value_dim
    key_width = (qkv.shape[1] - value_width) // 2
    query, key, value = inputs.split((key_width, key_width, value_width), dim=1)
    group = num_heads // (key_width // key_dim)
    # [T, num_heads, 1, key_dim] for products with states
    query = normalize(query.view(num_tokens, -1, key_dim)).mul_(key_dim**-0.5).repeat_interleave(group, 1)[:, :, None]
    key = normalize(key.view(num_tokens, -1, key_dim)).repeat_interleave(group, 1)[:, :, None]
    value = value.view(num_tokens, num_heads, value_dim)
    beta, decay = step_gates(gates[plan.token_order].float(), a_log, dt_bias)
    beta, decay = beta[:, :, None], decay[:, :, None, None]

    states = read_states(cache, plan)
    products = torch.empty_like(states)
    out = torch.empty_like(value)
    if -1 in plan.cuts:
        plan.cuts[-1].write(states, cache)
    start = 0
    for step, num_rows in enumerate(plan.row_counts):
        tokens = slice(start, start + num_rows)
        start += num_rows
        state, product = states[:num_rows], products[:num_rows]
        state.mul_(decay[tokens])
        known = torch.mul(state, key[tokens], out=product).sum(-1)
        change = (value[tokens] - known).mul_(beta[tokens])
        state.add_(torch.mul(change[..., None], key[tokens], out=product))
        torch.sum(torch.mul(state, query[tokens], out=product), -1, out=out[tokens])
        if step in plan.cuts:
            plan.cuts[step].write(states, cache)
    result = torch.empty(num_tokens, value_width, dtype=qkv.dtype)
    result[plan.token_order] = out.view(num_tokens, value_width).to(qkv.dtype)
    return result[:num_own]


def normalize(x: torch.Tensor) -> torch.Tensor:
    """x [..., N] float32 scaled to length 1 over the last dimension."""
    return x * (x * x).sum(-1, keepdim=True).add_(NORM_EPS).rsqrt_()


def step_gates(gates: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """gates [T, 2 * heads] float32, b then a -> beta and decay, [T, heads] each.

    Computed with exp and log1p, because the bits of `sigmoid` and `softplus` on a CPU depend on where each thread's
    share of the batch begins.
    """
    b, a = gates.chunk(2, dim=1)
    shifted = a + dt_bias
    softplus = shifted.clamp(min=0) + shifted.abs().neg_().exp_().log1p_()
    return b.neg().exp_().add_(1).reciprocal_(), softplus.mul_(-a_log.exp()).exp_()


def delta_rule_recurrent(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
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
    """Write out [T, heads * value_dim] and states of `num_rows` rows from `first_row` on.

    Arguments as those of `gated_delta_rule`. `one_token`: these rows have one token each. `replay` and `pending`: what
    these rows, the first ones, compute again.
    """
    _, num_heads, value_dim, key_dim = cache.shape
    assert qkv.stride(1) == gates.stride(1) == 1
    assert cache.is_contiguous()
    assert out.is_contiguous()
    block_v = min(MAX_BLOCK_V, next_power_of_2(value_dim))
    delta_rule_recurrent_kernel[(num_rows, num_heads, cdiv(value_dim, block_v))](
        qkv,
        gates,
        a_log,
        dt_bias,
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
        qkv.stride(0),
        gates.stride(0),
        key_dim**-0.5,
        NUM_HEADS=num_heads,
        NUM_KEY_HEADS=(qkv.shape[1] - num_heads * value_dim) // (2 * key_dim),
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_K=next_power_of_2(key_dim),
        BLOCK_V=block_v,
        WIDTH=replay.width,
        ONE_TOKEN=one_token,
        num_warps=4,
    )


@triton.jit
def log_decay(a, a_log, dt_bias):
    """-exp(a_log) * softplus(a + dt_bias), in float32"""
    shifted = a + dt_bias
    softplus = tl.maximum(shifted, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(shifted)))
    return -tl.exp(a_log) * softplus


@kernel(
    do_not_specialize=["first_row"], do_not_specialize_on_alignment=["num_pending_ptr", "num_kept_ptr", "starts_ptr"]
)
def delta_rule_recurrent_kernel(
    qkv_ptr,  # [num_tokens, (2 * NUM_KEY_HEADS) * KEY_DIM + NUM_HEADS * VALUE_DIM]
    gates_ptr,  # [num_tokens, 2 * NUM_HEADS]
    a_log_ptr,  # [NUM_HEADS] float32
    dt_bias_ptr,  # [NUM_HEADS] float32
    cache_ptr,  # [slots, NUM_HEADS, VALUE_DIM, KEY_DIM] float32
    out_ptr,  # [num_tokens, NUM_HEADS * VALUE_DIM]
    pending_qkv_ptr,  # [rows, WIDTH, …] as `qkv_ptr`; this and the other four of pending tokens: None if WIDTH is 0
    pending_gates_ptr,  # [rows, WIDTH, 2 * NUM_HEADS]
    query_start_loc_ptr,  # [rows + 1]
    read_ptr,  # [rows]
    write_ptr,  # [segments]
    first_segments_ptr,  # [rows + 1]
    segment_start_loc_ptr,  # [segments + 1]
    num_pending_ptr,  # [rows]
    num_kept_ptr,  # [rows]
    starts_ptr,  # [rows]
    first_row,
    stride_qkv_token,
    stride_gates_token,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WIDTH: tl.constexpr,  # most pending tokens of a row; then each row has one segment
    ONE_TOKEN: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = first_row + tl.program_id(0)
    head = tl.program_id(1)
    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    key_index = tl.arange(0, BLOCK_K)
    value_index = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    key_mask = key_index < KEY_DIM
    value_mask = value_index < VALUE_DIM
    # [BLOCK_V, BLOCK_K]
    mask = value_mask[:, None] & key_mask[None, :]
    place = (head * VALUE_DIM + value_index)[:, None] * KEY_DIM + key_index[None, :]
    slot = tl.load(read_ptr + row).to(tl.int64)
    state = tl.load(cache_ptr + slot * (NUM_HEADS * VALUE_DIM * KEY_DIM) + place, mask=mask & (slot >= 0), other=0.0)
    a_log = tl.load(a_log_ptr + head)
    dt_bias = tl.load(dt_bias_ptr + head)
    out_place = out_ptr + head * VALUE_DIM + value_index
    if WIDTH:  # two parts instead of segments: the pending tokens, then the row's own
        segment = 0
        end_segment = 2
        num_kept = tl.load(num_kept_ptr + row)
        row_start = tl.load(query_start_loc_ptr + row).to(tl.int64)
        padding_place = out_place + row_start * (NUM_HEADS * VALUE_DIM)
        for _ in range(row_start, tl.load(starts_ptr + row)):
            tl.store(padding_place, tl.zeros([BLOCK_V], tl.float32), mask=value_mask)
            padding_place += NUM_HEADS * VALUE_DIM
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
        tokens_ptr = qkv_ptr
        tokens_gates_ptr = gates_ptr
        stride = stride_qkv_token
        stride_gates = stride_gates_token
        if WIDTH:
            is_own = segment == 1
            is_written = is_written & ((num_kept == 0) == is_own)
            is_out = is_out & is_own
            tokens_ptr = tl.where(is_own, qkv_ptr, pending_qkv_ptr)
            tokens_gates_ptr = tl.where(is_own, gates_ptr, pending_gates_ptr)
            stride = tl.where(is_own, stride, 2 * NUM_KEY_HEADS * KEY_DIM + NUM_HEADS * VALUE_DIM)
            stride_gates = tl.where(is_own, stride_gates, 2 * NUM_HEADS)
            first = row * WIDTH
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
            q_place = tokens_ptr + token * stride + key_head * KEY_DIM + key_index
            v_place = tokens_ptr + token * stride + (2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM)
            gate_place = tokens_gates_ptr + token * stride_gates + head
            query = tl.load(q_place, mask=key_mask, other=0.0).to(tl.float32)
            key = tl.load(q_place + NUM_KEY_HEADS * KEY_DIM, mask=key_mask, other=0.0).to(tl.float32)
            value = tl.load(v_place + value_index, mask=value_mask, other=0.0).to(tl.float32)
            b = tl.load(gate_place).to(tl.float32)
            a = tl.load(gate_place + NUM_HEADS).to(tl.float32)
            query = query * (scale / tl.sqrt(tl.sum(query * query, axis=0) + 1e-6))
            key = key * (1.0 / tl.sqrt(tl.sum(key * key, axis=0) + 1e-6))
            state = state * tl.exp(log_decay(a, a_log, dt_bias))
            known = tl.sum(state * key[None, :], axis=1)
            change = (value - known) / (1.0 + tl.exp(-b))
            state += change[:, None] * key[None, :]
            result = tl.sum(state * query[None, :], axis=1)
            tl.store(out_place + token * (NUM_HEADS * VALUE_DIM), result, mask=is_out)
            token += 1
        tl.store(cache_ptr + slot * (NUM_HEADS * VALUE_DIM * KEY_DIM) + place, state, mask=mask & is_written)
        segment += 1
