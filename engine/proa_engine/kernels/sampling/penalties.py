"""Penalties of tokens that a request has already: two kernels in place of torch's operators, which write arrays of the
vocabulary's size a dozen times.

The first (grid: rows, parts of their tokens) counts each row's tokens, the second (grid: rows, chunks of the
vocabulary) computes the logits. Rows without penalties count nothing, and their logits stay as they are.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from proa_engine.kernels.launch import begin, cdiv, kernel
from proa_engine.kernels.sampling import sampling_params as columns
from proa_engine.kernels.sampling.sampling_reference import apply_penalties

COUNTED = 1024  # tokens of a program
CHUNK = 4096
IN_PROMPT = tl.constexpr(1 << 30)  # beside the number of times in the output
_COLUMNS: Mapping[str, Any] = dict(
    REPETITION=columns.REPETITION,
    FREQUENCY=columns.FREQUENCY,
    PRESENCE=columns.PRESENCE,
    NUM_COLUMNS=columns.NUM_COLUMNS,
)


def penalize(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    params: torch.Tensor,
    slots: torch.Tensor,
    num_tokens: torch.Tensor,
    max_num_tokens: int,
) -> torch.Tensor:
    """logits [rows, vocab] -> the same with penalties, float32. GPU only.

    Row r has the parameters of row slots[r] of `params` (columns as in `sampling_params`), and the first num_tokens[r]
    of token_ids[slots[r]]: prompt, then output, at most `max_num_tokens`; below 0: no token. token_ids [slots, length]
    int32; slots and num_tokens [rows] int64.
    """
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    assert token_ids.stride(1) == 1
    assert params.is_contiguous()
    counts = torch.zeros(rows, vocab_size, dtype=torch.int32, device=logits.device)
    count_tokens_kernel[(rows, cdiv(max_num_tokens, COUNTED))](
        token_ids,
        params,
        slots,
        num_tokens,
        counts,
        vocab_size,
        token_ids.stride(0),
        **_COLUMNS,
        NUM_PROMPT=columns.NUM_PROMPT,
        BLOCK=COUNTED,
        num_warps=4,
    )
    penalized = torch.empty(rows, vocab_size, dtype=torch.float32, device=logits.device)
    penalize_kernel[(rows, cdiv(vocab_size, CHUNK))](
        logits,
        params,
        slots,
        counts,
        penalized,
        vocab_size,
        logits.stride(0),
        **_COLUMNS,
        CHUNK=CHUNK,
        num_warps=8,
    )
    return penalized


def penalize_reference(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    params: torch.Tensor,
    slots: torch.Tensor,
    num_tokens: torch.Tensor,
    max_num_tokens: int,
) -> torch.Tensor:
    """As `penalize`; float32 logits are changed in place."""
    penalized, of_rows = logits.float(), params[slots]
    apply_penalties(
        penalized,
        token_ids[slots, :max_num_tokens].long(),
        num_prompt_tokens=of_rows[:, columns.NUM_PROMPT].long(),
        num_tokens=num_tokens,
        repetition=of_rows[:, columns.REPETITION].float(),
        frequency=of_rows[:, columns.FREQUENCY].float(),
        presence=of_rows[:, columns.PRESENCE].float(),
    )
    return penalized


@triton.jit
def load_penalties(params_ptr, REPETITION: tl.constexpr, FREQUENCY: tl.constexpr, PRESENCE: tl.constexpr):
    """Return a row's three penalties, and whether any of them changes a logit."""
    repetition = tl.load(params_ptr + REPETITION).to(tl.float32)
    frequency = tl.load(params_ptr + FREQUENCY).to(tl.float32)
    presence = tl.load(params_ptr + PRESENCE).to(tl.float32)
    return repetition, frequency, presence, (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)


@kernel(do_not_specialize_on_alignment=["slots_ptr", "num_tokens_ptr"])
def count_tokens_kernel(
    token_ids_ptr,  # [slots, length] int32
    params_ptr,  # [slots, NUM_COLUMNS] float64
    slots_ptr,  # [rows] int64
    num_tokens_ptr,  # [rows] int64
    counts_ptr,  # [rows, vocab_size] int32, zeros before
    vocab_size,
    stride_token_ids_slot,
    REPETITION: tl.constexpr,
    FREQUENCY: tl.constexpr,
    PRESENCE: tl.constexpr,
    NUM_PROMPT: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    params_ptr += slot * NUM_COLUMNS
    _, _, _, is_penalized = load_penalties(params_ptr, REPETITION, FREQUENCY, PRESENCE)
    if not is_penalized:
        return
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = place < tl.load(num_tokens_ptr + row)
    token = tl.load(token_ids_ptr + slot * stride_token_ids_slot + place, mask=is_token, other=-1)
    is_token = (token >= 0) & (token < vocab_size)
    is_output = place >= tl.load(params_ptr + NUM_PROMPT).to(tl.int64)
    counts_ptr += row * vocab_size + token
    ones = tl.full([BLOCK], 1, tl.int32)
    tl.atomic_add(counts_ptr, ones, mask=is_token & is_output, sem="relaxed")
    tl.atomic_or(counts_ptr, ones * IN_PROMPT, mask=is_token & ~is_output, sem="relaxed")


@kernel(do_not_specialize_on_alignment=["slots_ptr"])
def penalize_kernel(
    logits_ptr,  # [rows, vocab_size]
    params_ptr,  # [slots, NUM_COLUMNS] float64
    slots_ptr,  # [rows] int64
    counts_ptr,  # [rows, vocab_size] int32
    penalized_ptr,  # [rows, vocab_size] float32
    vocab_size,
    stride_logits_row,
    REPETITION: tl.constexpr,
    FREQUENCY: tl.constexpr,
    PRESENCE: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    params_ptr += tl.load(slots_ptr + row) * NUM_COLUMNS
    repetition, frequency, presence, is_penalized = load_penalties(params_ptr, REPETITION, FREQUENCY, PRESENCE)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = token < vocab_size
    x = tl.load(logits_ptr + row * stride_logits_row + token, mask=mask, other=0.0).to(tl.float32)
    if is_penalized:
        counts = tl.load(counts_ptr + row * vocab_size + token, mask=mask, other=0)
        x = tl.where(counts != 0, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
        in_output = (counts & (IN_PROMPT - 1)).to(tl.float32)
        x = x - in_output * frequency - tl.where(in_output > 0, presence, 0.0)
    tl.store(penalized_ptr + row * vocab_size + token, x, mask=mask)
