"""The gated delta rule token by token, in Triton: decodes, and every row in batch-invariant mode.

A program computes BLOCK_V rows of one head's state for one row of the batch. It holds them in registers in float32 and
writes them once a segment. Formulas as in `delta_rule_reference`. Grid: (rows, heads, blocks of value_dim).
"""

import torch
import triton
import triton.language as tl

from proa_engine.kernels.launch import kernel
from proa_engine.kernels.sizes import cdiv, next_power_of_2
from proa_engine.kernels.state_rows import StateRows

MAX_BLOCK_V = 32


def delta_rule_recurrent(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    rows: StateRows,
    num_rows: int,
    *,
    one_token: bool,
) -> None:
    """Write out [T, heads * value_dim] and states of the first `num_rows` rows.

    Arguments as those of `gated_delta_rule`. `one_token`: these rows have one token each.
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
        rows.read,
        rows.write,
        rows.first_segments,
        rows.segment_start_loc,
        qkv.stride(0),
        gates.stride(0),
        key_dim**-0.5,
        NUM_HEADS=num_heads,
        NUM_KEY_HEADS=(qkv.shape[1] - num_heads * value_dim) // (2 * key_dim),
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_K=next_power_of_2(key_dim),
        BLOCK_V=block_v,
        ONE_TOKEN=one_token,
        num_warps=4,
    )


@triton.jit
def log_decay(a, a_log, dt_bias):
    """-exp(a_log) * softplus(a + dt_bias), in float32"""
    shifted = a + dt_bias
    softplus = tl.maximum(shifted, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(shifted)))
    return -tl.exp(a_log) * softplus


@kernel
def delta_rule_recurrent_kernel(
    qkv_ptr,  # [num_tokens, (2 * NUM_KEY_HEADS) * KEY_DIM + NUM_HEADS * VALUE_DIM]
    gates_ptr,  # [num_tokens, 2 * NUM_HEADS]
    a_log_ptr,  # [NUM_HEADS] float32
    dt_bias_ptr,  # [NUM_HEADS] float32
    cache_ptr,  # [slots, NUM_HEADS, VALUE_DIM, KEY_DIM] float32
    out_ptr,  # [num_tokens, NUM_HEADS * VALUE_DIM]
    read_ptr,  # [rows]
    write_ptr,  # [segments]
    first_segments_ptr,  # [rows + 1]
    segment_start_loc_ptr,  # [segments + 1]
    stride_qkv_token,
    stride_gates_token,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
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
    if ONE_TOKEN:
        segment = row
        end_segment = row + 1
    else:
        segment = tl.load(first_segments_ptr + row)
        end_segment = tl.load(first_segments_ptr + row + 1)
    while segment < end_segment:
        if ONE_TOKEN:
            token = row.to(tl.int64)
            end = token + 1
        else:
            token = tl.load(segment_start_loc_ptr + segment).to(tl.int64)
            end = tl.load(segment_start_loc_ptr + segment + 1).to(tl.int64)
        while token < end:
            q_place = qkv_ptr + token * stride_qkv_token + key_head * KEY_DIM + key_index
            v_place = qkv_ptr + token * stride_qkv_token + (2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM)
            query = tl.load(q_place, mask=key_mask, other=0.0).to(tl.float32)
            key = tl.load(q_place + NUM_KEY_HEADS * KEY_DIM, mask=key_mask, other=0.0).to(tl.float32)
            value = tl.load(v_place + value_index, mask=value_mask, other=0.0).to(tl.float32)
            b = tl.load(gates_ptr + token * stride_gates_token + head).to(tl.float32)
            a = tl.load(gates_ptr + token * stride_gates_token + NUM_HEADS + head).to(tl.float32)
            query = query * (scale / tl.sqrt(tl.sum(query * query, axis=0) + 1e-6))
            key = key * (1.0 / tl.sqrt(tl.sum(key * key, axis=0) + 1e-6))
            state = state * tl.exp(log_decay(a, a_log, dt_bias))
            known = tl.sum(state * key[None, :], axis=1)
            change = (value - known) / (1.0 + tl.exp(-b))
            state += change[:, None] * key[None, :]
            result = tl.sum(state * query[None, :], axis=1)
            out_place = out_ptr + token * (NUM_HEADS * VALUE_DIM) + head * VALUE_DIM + value_index
            tl.store(out_place, result, mask=value_mask)
            token += 1
        slot = tl.load(write_ptr + segment).to(tl.int64)
        tl.store(cache_ptr + slot * (NUM_HEADS * VALUE_DIM * KEY_DIM) + place, state, mask=mask & (slot >= 0))
        segment += 1
