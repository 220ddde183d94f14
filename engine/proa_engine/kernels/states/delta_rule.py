"""The gated delta rule of a mixed batch (Yang et al. 2024, arXiv 2412.06464): decodes and rows with drafts first, then
chunks of prompts.

On a GPU these are computed token by token and other rows in chunks of 64 tokens, unless a token's bits must not depend
on chunks. Chunks use the WY form of the rule's transitions (section 3.3). With g the sum of log decays since the
chunk's beginning and S the state before it, the changes that a chunk's tokens make to the state are the rows of
    C = U - W Sᵀ,  U = T diag(beta) V,  W = T diag(beta exp(g)) K,  T = (I + A)⁻¹,
    A[i, j] = beta[i] (k[i]·k[j]) exp(g[i] - g[j]) for j < i, 0 elsewhere,
and with P[i, j] = (q[i]·k[j]) exp(g[i] - g[j]) for j <= i, 0 elsewhere,
    out = diag(exp(g)) Q Sᵀ + P C,  S' = exp(g[last]) S + Cᵀ diag(exp(g[last] - g)) K.
The first kernel computes W, U, P and g of all chunks at once, the second one S from chunk to chunk. A segment begins a
chunk of its own, so states at cuts are those between chunks.
"""

import torch
import triton
import triton.language as tl

from proa_engine.kernels.attention.prefill_attention import find_request
from proa_engine.kernels.launch import INTERPRETED, cdiv, kernel, next_power_of_2
from proa_engine.kernels.states.delta_rule_recurrent import delta_rule_recurrent, delta_rule_reference, log_decay
from proa_engine.kernels.states.state_rows import NoPendingInputs, PendingInputs, StatePlan, StateRows
from proa_engine.kernels.tilings import tilings_of

CHUNK = 64
MAX_BLOCK_V = 32  # of the second kernel


def delta_rule_chunk(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    rows: StateRows,
    first_row: int,
) -> None:
    """Write out [T, heads * value_dim] and states of all rows behind the first `first_row`, which have one segment
    each.

    Arguments as those of `gated_delta_rule`.
    """
    _, num_heads, value_dim, key_dim = cache.shape
    num_tokens = qkv.shape[0]
    num_rows, num_segments = rows.read.shape[0] - first_row, rows.write.shape[0] - first_row
    num_key_heads = (qkv.shape[1] - num_heads * value_dim) // (2 * key_dim)
    assert qkv.stride(1) == gates.stride(1) == 1
    assert cache.is_contiguous()
    assert out.is_contiguous()
    known = torch.empty(num_tokens, num_heads, key_dim, dtype=qkv.dtype, device=qkv.device)
    change = torch.empty(num_tokens, num_heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    scores = torch.empty(num_tokens, num_heads, CHUNK, dtype=qkv.dtype, device=qkv.device)
    log_decays = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=qkv.device)
    # With 16 numbers of a key and 16 or 32 of a value, Triton 3.6 compiles the first kernel for 16 bits wrongly.
    block_k, block_v = max(32, next_power_of_2(key_dim)), max(16, next_power_of_2(value_dim))
    sizes = {
        "NUM_HEADS": num_heads,
        "NUM_KEY_HEADS": num_key_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "CHUNK": CHUNK,
        "BLOCK_K": block_k,
    }
    num_chunks = (num_tokens - first_row) // CHUNK + num_segments  # an upper bound
    delta_rule_chunk_kernel[(num_chunks, num_heads)](
        qkv,
        gates,
        a_log,
        dt_bias,
        known,
        change,
        scores,
        log_decays,
        rows.segment_start_loc,
        first_row,
        num_segments,
        qkv.stride(0),
        gates.stride(0),
        key_dim**-0.5,
        **sizes,
        BLOCK_V=block_v,
        INVERSE_PRECISION=_inverse_precision(qkv),
        num_warps=4,
    )
    block_v = min(MAX_BLOCK_V, block_v)
    delta_rule_scan_kernel[(num_rows, num_heads, cdiv(value_dim, block_v))](
        qkv,
        known,
        change,
        scores,
        log_decays,
        cache,
        out,
        rows.read,
        rows.write,
        rows.first_segments,
        rows.segment_start_loc,
        first_row,
        qkv.stride(0),
        key_dim**-0.5,
        **sizes,
        BLOCK_V=block_v,
        num_warps=8 if qkv.element_size() == 4 else 4,
        num_stages=1 if qkv.element_size() == 4 else tilings_of(qkv.device).scan_stages,
    )


def _inverse_precision(qkv: torch.Tensor) -> str:
    """Three bf16 products have 16 bits, twice those of a 16-bit result, and their operands fit into registers."""
    return "tf32x3" if INTERPRETED or qkv.element_size() == 4 else "bf16x3"  # the interpreter lacks bf16x3


@triton.jit
def inverse_of_unit_lower(lower, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)⁻¹ for a strictly lower triangular [CHUNK, CHUNK], CHUNK a power of two.

    By blocks on the diagonal that double in size: with their inverses X and L the part of `lower` that joins two of
    them, the inverses of twice the size are X - X L X. A power series of `lower` would cancel digits.
    """
    # [CHUNK, CHUNK]
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(row == column, 1.0, tl.where(row ^ column == 1, -lower, 0.0))
    size = 2
    while size < CHUNK:
        joint = tl.where((row // size) ^ (column // size) == 1, lower, 0.0)
        product = tl.dot(inverse, joint, input_precision=PRECISION)
        inverse -= tl.dot(product, inverse, input_precision=PRECISION)
        size *= 2
    return inverse


@triton.jit
def inverse_lengths(rows):
    """1 / length of each row, with NORM_EPS as in `delta_rule_recurrent`"""
    values = rows.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(values * values, axis=1) + 1e-6)


@kernel(do_not_specialize=["first_segment", "num_segments"])
def delta_rule_chunk_kernel(
    qkv_ptr,  # [num_tokens, (2 * NUM_KEY_HEADS) * KEY_DIM + NUM_HEADS * VALUE_DIM]
    gates_ptr,  # [num_tokens, 2 * NUM_HEADS]
    a_log_ptr,  # [NUM_HEADS] float32
    dt_bias_ptr,  # [NUM_HEADS] float32
    known_ptr,  # W [num_tokens, NUM_HEADS, KEY_DIM]
    change_ptr,  # U [num_tokens, NUM_HEADS, VALUE_DIM]
    scores_ptr,  # P [num_tokens, NUM_HEADS, CHUNK]
    log_decays_ptr,  # g [num_tokens, NUM_HEADS] float32
    segment_start_loc_ptr,  # [first_segment + num_segments + 1]
    first_segment,
    num_segments,
    stride_qkv_token,
    stride_gates_token,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
):
    block = tl.program_id(0)
    head = tl.program_id(1)
    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
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
    key_index = tl.arange(0, BLOCK_K)
    value_index = tl.arange(0, BLOCK_V)
    key_mask = is_token[:, None] & (key_index < KEY_DIM)[None, :]
    value_mask = is_token[:, None] & (value_index < VALUE_DIM)[None, :]
    # [CHUNK, BLOCK_K], [CHUNK, BLOCK_V]
    q_place = qkv_ptr + (token * stride_qkv_token)[:, None] + key_head * KEY_DIM + key_index[None, :]
    query = tl.load(q_place, mask=key_mask, other=0.0)
    key = tl.load(q_place + NUM_KEY_HEADS * KEY_DIM, mask=key_mask, other=0.0)

    gate_place = gates_ptr + token * stride_gates_token + head
    b = tl.load(gate_place, mask=is_token, other=0.0).to(tl.float32)
    a = tl.load(gate_place + NUM_HEADS, mask=is_token, other=0.0).to(tl.float32)
    beta = tl.where(is_token, 1.0 / (1.0 + tl.exp(-b)), 0.0)
    decays = log_decay(a, tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head))
    log_decays = tl.cumsum(tl.where(is_token, decays, 0.0), axis=0)
    tl.store(log_decays_ptr + token * NUM_HEADS + head, log_decays, mask=is_token)

    # [CHUNK, CHUNK]
    distance = tl.where(place[:, None] >= place[None, :], log_decays[:, None] - log_decays[None, :], float("-inf"))
    decay = tl.exp(distance)
    key_scale = inverse_lengths(key)
    query_scale = inverse_lengths(query) * scale
    scores = tl.dot(query, tl.trans(key), input_precision="tf32x3")
    scores = scores * query_scale[:, None] * key_scale[None, :] * decay
    scores_place = (token * NUM_HEADS + head)[:, None] * CHUNK + place[None, :]
    tl.store(scores_ptr + scores_place, scores, mask=is_token[:, None])

    overlap = tl.dot(key, tl.trans(key), input_precision="tf32x3")
    overlap = overlap * (beta * key_scale)[:, None] * key_scale[None, :] * decay
    overlap = tl.where(place[:, None] > place[None, :], overlap, 0.0)
    inverse = inverse_of_unit_lower(overlap, CHUNK, INVERSE_PRECISION)
    # Loaded here, and the keys again, because registers cannot hold them beside the inverse.
    v_place = (token * stride_qkv_token)[:, None] + 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM
    value = tl.load(qkv_ptr + v_place + value_index[None, :], mask=value_mask, other=0.0)
    key = tl.load(q_place + NUM_KEY_HEADS * KEY_DIM, mask=key_mask, other=0.0)
    known = (inverse * (beta * key_scale * tl.exp(log_decays))[None, :]).to(key.dtype)
    known = tl.dot(known, key, input_precision="tf32x3")
    known_place = (token * NUM_HEADS + head)[:, None] * KEY_DIM + key_index[None, :]
    tl.store(known_ptr + known_place, known, mask=key_mask)
    change = tl.dot((inverse * beta[None, :]).to(value.dtype), value, input_precision="tf32x3")
    change_place = (token * NUM_HEADS + head)[:, None] * VALUE_DIM + value_index[None, :]
    tl.store(change_ptr + change_place, change, mask=value_mask)


@kernel(do_not_specialize=["first_row"])
def delta_rule_scan_kernel(
    qkv_ptr,  # [num_tokens, (2 * NUM_KEY_HEADS) * KEY_DIM + NUM_HEADS * VALUE_DIM]
    known_ptr,  # W [num_tokens, NUM_HEADS, KEY_DIM]
    change_ptr,  # U [num_tokens, NUM_HEADS, VALUE_DIM]
    scores_ptr,  # P [num_tokens, NUM_HEADS, CHUNK]
    log_decays_ptr,  # g [num_tokens, NUM_HEADS] float32
    cache_ptr,  # [slots, NUM_HEADS, VALUE_DIM, KEY_DIM] float32
    out_ptr,  # [num_tokens, NUM_HEADS * VALUE_DIM]
    read_ptr,  # [rows]
    write_ptr,  # [segments]
    first_segments_ptr,  # [rows + 1]
    segment_start_loc_ptr,  # [segments + 1]
    first_row,
    stride_qkv_token,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = first_row + tl.program_id(0)
    head = tl.program_id(1)
    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    place = tl.arange(0, CHUNK)
    key_index = tl.arange(0, BLOCK_K)
    value_index = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key = key_index < KEY_DIM
    in_value = value_index < VALUE_DIM
    # [BLOCK_K, BLOCK_V]: transposed, so that both products with it have a tile of 64 or more rows
    state_mask = in_key[:, None] & in_value[None, :]
    state_place = (head * VALUE_DIM + value_index)[None, :] * KEY_DIM + key_index[:, None]
    slot = tl.load(read_ptr + row).to(tl.int64)
    state_size: tl.constexpr = NUM_HEADS * VALUE_DIM * KEY_DIM
    state = tl.load(cache_ptr + slot * state_size + state_place, mask=state_mask & (slot >= 0), other=0.0)
    for segment in range(tl.load(first_segments_ptr + row), tl.load(first_segments_ptr + row + 1)):
        end = tl.load(segment_start_loc_ptr + segment + 1)
        for first in range(tl.load(segment_start_loc_ptr + segment), end, CHUNK):
            is_token = first + place < end
            token = (first + place).to(tl.int64)
            head_row = (token * NUM_HEADS + head)[:, None]
            key_mask = is_token[:, None] & in_key[None, :]
            value_mask = is_token[:, None] & in_value[None, :]
            q_place = qkv_ptr + (token * stride_qkv_token)[:, None] + key_head * KEY_DIM + key_index[None, :]
            query = tl.load(q_place, mask=key_mask, other=0.0)
            key = tl.load(q_place + NUM_KEY_HEADS * KEY_DIM, mask=key_mask, other=0.0)
            known = tl.load(known_ptr + head_row * KEY_DIM + key_index[None, :], mask=key_mask, other=0.0)
            change = tl.load(change_ptr + head_row * VALUE_DIM + value_index[None, :], mask=value_mask, other=0.0)
            scores = tl.load(scores_ptr + head_row * CHUNK + place[None, :], mask=is_token[:, None], other=0.0)
            log_decays = tl.load(log_decays_ptr + token * NUM_HEADS + head, mask=is_token, other=0.0)
            last = tl.load(log_decays_ptr + (tl.minimum(first + CHUNK, end) - 1).to(tl.int64) * NUM_HEADS + head)

            rounded = state.to(key.dtype)
            # [CHUNK, BLOCK_V]
            made = change.to(tl.float32) - tl.dot(known, rounded, input_precision="tf32x3")
            result = tl.dot(query, rounded, input_precision="tf32x3")
            result *= (inverse_lengths(query) * scale * tl.exp(log_decays))[:, None]
            result = tl.dot(scores, made.to(key.dtype), result, input_precision="tf32x3")
            out_place = out_ptr + head_row * VALUE_DIM + value_index[None, :]
            tl.store(out_place, result, mask=value_mask)
            kept = made * (inverse_lengths(key) * tl.exp(last - log_decays))[:, None]
            state = tl.dot(tl.trans(key), kept.to(key.dtype), state * tl.exp(last), input_precision="tf32x3")
        slot = tl.load(write_ptr + segment).to(tl.int64)
        tl.store(cache_ptr + slot * state_size + state_place, state, mask=state_mask & (slot >= 0))


def gated_delta_rule(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    rows: StateRows,
    *,
    pending: PendingInputs | NoPendingInputs,
    num_decodes: int,
    batch_invariant: bool,
    plan: StatePlan | None,
) -> torch.Tensor:
    """qkv [T, 2 * key heads * key_dim + heads * value_dim] -> [T, heads * value_dim], in qkv's type.

    Writes the states at the ends of segments to `cache` [slots, heads, value_dim, key_dim] float32. `gates` [T, 2 *
    heads] are each head's b, then each head's a; `a_log` and `dt_bias` are [heads] float32. Value heads share key heads
    in groups: value head h uses key head h // (heads / key heads). `pending` belongs to `rows.replay`; `plan` is set on
    a CPU.
    """
    if plan is not None:
        return delta_rule_reference(qkv, gates, a_log, dt_bias, cache, pending, plan)
    _, num_heads, value_dim, _ = cache.shape
    num_rows, replay = rows.read.shape[0], rows.replay
    out = torch.empty(qkv.shape[0], num_heads * value_dim, dtype=qkv.dtype, device=qkv.device)
    inputs = qkv, gates, a_log, dt_bias, cache, out
    num_recurrent = max(replay.num_rows, 0 if batch_invariant else num_decodes)
    if num_recurrent:
        delta_rule_recurrent(
            *inputs,
            rows,
            query_start_loc,
            0,
            num_recurrent,
            one_token=not replay.width,
            replay=replay,
            pending=pending,
        )
    num_left = num_rows - num_recurrent
    if num_left and batch_invariant:
        delta_rule_recurrent(*inputs, rows, query_start_loc, num_recurrent, num_left, one_token=False)
    elif num_left:
        delta_rule_chunk(*inputs, rows, num_recurrent)
    return out
