"""The state space of Mamba2 in a mixed batch (Dao and Gu 2024, arXiv 2405.21060): decodes and rows with drafts first,
then chunks of prompts.

On a GPU these are computed token by token and other rows in chunks of 64 tokens, unless a token's bits must not depend
on chunks. With g the sum of log decays since the chunk's beginning and S the state before it,
    out = diag(exp(g)) C Sᵀ + P X + D X,  P[i, j] = (C[i]·B[j]) exp(g[i] - g[j]) step[j] for j <= i, 0 elsewhere,
    S' = exp(g[last]) S + Xᵀ diag(exp(g[last] - g) step) B.
The first kernel computes C Bᵀ of all chunks at once, for each group, the second one S from chunk to chunk for each
head. A segment begins a chunk of its own, so states at cuts are those between chunks.
"""

import torch
import triton.language as tl

from proa_engine.kernels.attention.prefill_attention import find_request
from proa_engine.kernels.launch import cdiv, kernel, next_power_of_2
from proa_engine.kernels.states.ssd_recurrent import SsdWeights, ssd_recurrent, ssd_reference, time_step
from proa_engine.kernels.states.state_rows import NoPendingInputs, PendingInputs, StatePlan, StateRows
from proa_engine.kernels.tilings import tilings_of

CHUNK = 64
MAX_BLOCK_P = 32  # of the second kernel
# With tiles of 16, Triton 3.6 compiles a product of 16 bits wrongly (see `delta_rule_chunk`).
MIN_BLOCK_N = 32


def ssd(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    weights: SsdWeights,
    cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    rows: StateRows,
    *,
    pending: PendingInputs | NoPendingInputs,
    num_decodes: int,
    batch_invariant: bool,
    plan: StatePlan | None,
) -> torch.Tensor:
    """xbc [T, heads * head_dim + 2 * groups * state_size] -> [T, heads * head_dim], in xbc's type.

    `xbc` are the heads' x, then the groups' B, then their C. Writes the states at the ends of segments to `cache`
    [slots, heads, head_dim, state_size] float32. `dt` [T, heads]. Head h uses group h // (heads / groups). `pending`
    belongs to `rows.replay`; `plan` is set on a CPU.
    """
    if plan is not None:
        return ssd_reference(xbc, dt, weights, cache, pending, plan)
    _, num_heads, head_dim, _ = cache.shape
    num_rows, replay = rows.read.shape[0], rows.replay
    out = torch.empty(xbc.shape[0], num_heads * head_dim, dtype=xbc.dtype, device=xbc.device)
    inputs = xbc, dt, weights, cache, out, rows
    num_first = max(replay.num_rows, 0 if batch_invariant else num_decodes)
    if num_first:
        ssd_recurrent(
            *inputs, query_start_loc, 0, num_first, one_token=not replay.width, replay=replay, pending=pending
        )
    num_left = num_rows - num_first
    if num_left and batch_invariant:
        ssd_recurrent(*inputs, query_start_loc, num_first, num_left, one_token=False)
    elif num_left:
        ssd_chunk(*inputs, num_first)
    return out


def ssd_chunk(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    weights: SsdWeights,
    cache: torch.Tensor,
    out: torch.Tensor,
    rows: StateRows,
    first_row: int,
) -> None:
    """Write out [T, heads * head_dim] and states of all rows behind the first `first_row`, which have one segment each.

    Arguments as those of `ssd`.
    """
    _, num_heads, head_dim, state_size = cache.shape
    num_tokens = xbc.shape[0]
    num_rows, num_segments = rows.read.shape[0] - first_row, rows.write.shape[0] - first_row
    num_groups = (xbc.shape[1] - num_heads * head_dim) // (2 * state_size)
    assert xbc.stride(1) == dt.stride(1) == 1
    assert cache.is_contiguous()
    assert out.is_contiguous()
    scores = torch.empty(num_tokens, num_groups, CHUNK, dtype=torch.float32, device=xbc.device)
    sizes = {
        "NUM_HEADS": num_heads,
        "NUM_GROUPS": num_groups,
        "HEAD_DIM": head_dim,
        "STATE_SIZE": state_size,
        "CHUNK": CHUNK,
        "BLOCK_N": max(MIN_BLOCK_N, next_power_of_2(state_size)),
    }
    num_chunks = (num_tokens - first_row) // CHUNK + num_segments  # an upper bound
    ssd_scores_kernel[(num_chunks, num_groups)](
        xbc, scores, rows.segment_start_loc, first_row, num_segments, xbc.stride(0), **sizes, num_warps=4
    )
    block_p = min(MAX_BLOCK_P, max(16, next_power_of_2(head_dim)))
    is_float32 = xbc.element_size() == 4
    ssd_scan_kernel[(num_rows, num_heads, cdiv(head_dim, block_p))](
        xbc,
        dt,
        weights.a_log,
        weights.dt_bias,
        weights.d,
        scores,
        cache,
        out,
        rows.read,
        rows.write,
        rows.first_segments,
        rows.segment_start_loc,
        first_row,
        xbc.stride(0),
        dt.stride(0),
        *weights.limit,
        **sizes,
        BLOCK_P=block_p,
        num_warps=8 if is_float32 or state_size > 128 else 4,
        num_stages=1 if is_float32 else tilings_of(xbc.device).scan_stages,
    )


@kernel(do_not_specialize=["first_segment", "num_segments"])
def ssd_scores_kernel(
    xbc_ptr,  # [num_tokens, NUM_HEADS * HEAD_DIM + 2 * NUM_GROUPS * STATE_SIZE]
    scores_ptr,  # C Bᵀ [num_tokens, NUM_GROUPS, CHUNK] float32
    segment_start_loc_ptr,  # [first_segment + num_segments + 1]
    first_segment,
    num_segments,
    stride_xbc_token,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    block = tl.program_id(0)
    group = tl.program_id(1)
    starts_ptr = segment_start_loc_ptr + first_segment
    segment = find_request(starts_ptr, block, num_segments, CHUNK)
    start = tl.load(starts_ptr + segment)
    end = tl.load(starts_ptr + segment + 1)
    first = start + (block - (start - tl.load(starts_ptr)) // CHUNK - segment) * CHUNK
    if first >= end:  # the grid is an upper bound
        return
    place = tl.arange(0, CHUNK)
    is_token = first + place < end
    token = (first + place).to(tl.int64)
    index = tl.arange(0, BLOCK_N)
    mask = is_token[:, None] & (index < STATE_SIZE)[None, :]
    # [CHUNK, BLOCK_N]
    b_place = xbc_ptr + (token * stride_xbc_token)[:, None] + NUM_HEADS * HEAD_DIM + group * STATE_SIZE + index[None, :]
    b = tl.load(b_place, mask=mask, other=0.0)
    c = tl.load(b_place + NUM_GROUPS * STATE_SIZE, mask=mask, other=0.0)
    scores = tl.dot(c, tl.trans(b), input_precision="tf32x3")
    scores_place = (token * NUM_GROUPS + group)[:, None] * CHUNK + place[None, :]
    tl.store(scores_ptr + scores_place, scores, mask=is_token[:, None])


@kernel(do_not_specialize=["first_row"])
def ssd_scan_kernel(
    xbc_ptr,  # [num_tokens, NUM_HEADS * HEAD_DIM + 2 * NUM_GROUPS * STATE_SIZE]
    dt_ptr,  # [num_tokens, NUM_HEADS]
    a_log_ptr,  # [NUM_HEADS] float32
    dt_bias_ptr,  # [NUM_HEADS] float32
    d_ptr,  # [NUM_HEADS] float32
    scores_ptr,  # C Bᵀ [num_tokens, NUM_GROUPS, CHUNK] float32
    cache_ptr,  # [slots, NUM_HEADS, HEAD_DIM, STATE_SIZE] float32
    out_ptr,  # [num_tokens, NUM_HEADS * HEAD_DIM]
    read_ptr,  # [rows]
    write_ptr,  # [segments]
    first_segments_ptr,  # [rows + 1]
    segment_start_loc_ptr,  # [segments + 1]
    first_row,
    stride_xbc_token,
    stride_dt_token,
    least_step,
    greatest_step,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    row = first_row + tl.program_id(0)
    head = tl.program_id(1)
    group = head // (NUM_HEADS // NUM_GROUPS)
    place = tl.arange(0, CHUNK)
    state_index = tl.arange(0, BLOCK_N)
    value_index = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    in_state = state_index < STATE_SIZE
    in_value = value_index < HEAD_DIM
    rate = -tl.exp(tl.load(a_log_ptr + head))
    dt_bias = tl.load(dt_bias_ptr + head)
    skip = tl.load(d_ptr + head)
    # [BLOCK_N, BLOCK_P]: transposed, so that both products with it have a tile of 64 or more rows
    state_mask = in_state[:, None] & in_value[None, :]
    state_place = (head * HEAD_DIM + value_index)[None, :] * STATE_SIZE + state_index[:, None]
    slot = tl.load(read_ptr + row).to(tl.int64)
    slot_size: tl.constexpr = NUM_HEADS * HEAD_DIM * STATE_SIZE
    state = tl.load(cache_ptr + slot * slot_size + state_place, mask=state_mask & (slot >= 0), other=0.0)
    for segment in range(tl.load(first_segments_ptr + row), tl.load(first_segments_ptr + row + 1)):
        end = tl.load(segment_start_loc_ptr + segment + 1)
        for first in range(tl.load(segment_start_loc_ptr + segment), end, CHUNK):
            is_token = first + place < end
            token = (first + place).to(tl.int64)
            value_mask = is_token[:, None] & in_value[None, :]
            group_mask = is_token[:, None] & in_state[None, :]
            token_place = xbc_ptr + (token * stride_xbc_token)[:, None]
            b_place = token_place + NUM_HEADS * HEAD_DIM + group * STATE_SIZE + state_index[None, :]
            x = tl.load(token_place + head * HEAD_DIM + value_index[None, :], mask=value_mask, other=0.0)
            b = tl.load(b_place, mask=group_mask, other=0.0)
            c = tl.load(b_place + NUM_GROUPS * STATE_SIZE, mask=group_mask, other=0.0)
            scores_place = (token * NUM_GROUPS + group)[:, None] * CHUNK + place[None, :]
            scores = tl.load(scores_ptr + scores_place, mask=is_token[:, None], other=0.0)
            dt = tl.load(dt_ptr + token * stride_dt_token + head, mask=is_token, other=0.0).to(tl.float32)
            step = tl.where(is_token, time_step(dt, dt_bias, least_step, greatest_step), 0.0)
            log_decays = tl.cumsum(rate * step, axis=0)
            # The last one of this sum itself, because another order of addition would give other digits.
            last = tl.sum(tl.where(place == CHUNK - 1, log_decays, 0.0), axis=0)

            distance = log_decays[:, None] - log_decays[None, :]
            decay = tl.exp(tl.where(place[:, None] >= place[None, :], distance, float("-inf")))
            within = (scores * decay * step[None, :]).to(x.dtype)
            # [CHUNK, BLOCK_P]
            result = tl.dot(c, state.to(c.dtype), input_precision="tf32x3") * tl.exp(log_decays)[:, None]
            result = tl.dot(within, x, result, input_precision="tf32x3")
            values = x.to(tl.float32)
            out_place = out_ptr + (token * NUM_HEADS + head)[:, None] * HEAD_DIM + value_index[None, :]
            tl.store(out_place, result + values * skip, mask=value_mask)
            kept = (values * (tl.exp(last - log_decays) * step)[:, None]).to(x.dtype)
            state = tl.dot(tl.trans(b), kept, state * tl.exp(last), input_precision="tf32x3")
        slot = tl.load(write_ptr + segment).to(tl.int64)
        tl.store(cache_ptr + slot * slot_size + state_place, state, mask=state_mask & (slot >= 0))
