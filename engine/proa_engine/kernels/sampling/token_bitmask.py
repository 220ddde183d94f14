"""Forbid tokens of some rows of logits by bitmasks: stores -inf where a token's bit is 0.

Grid: masked rows, chunks of the vocabulary. Logits are never read.
"""

import numpy as np
import torch
import triton.language as tl

from proa_engine.kernels.launch import INTERPRETED, cdiv, kernel

WORD = 32  # bits
CHUNK = 8192
BLOCK_TOKENS = 1 << 17  # of the rows that the reference masks at once: few calls, and limits that stay in a cache

# [256, 8] float32: the most that the logits of eight tokens may be, by their byte of a mask.
_LIMITS_OF_BYTE = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, np.inf, -np.inf).astype(np.float32)


def token_bitmask(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """Forbid tokens of logits [all rows, vocab], in place; float32 on a CPU, any float type elsewhere.

    rows [masked rows] int64 are rows of the logits, ascending. Row i may only choose token t if bit t % 32 of
    bits[i, t // 32] is set; bits [masked rows, words] int32 has a bit for every token, and may have more.
    """
    assert bits.shape[1] * WORD >= logits.shape[1]
    assert bits.is_contiguous()
    if logits.is_cpu and not INTERPRETED:
        token_bitmask_reference(logits, rows, bits)
        return
    vocab_size = logits.shape[1]
    assert logits.stride(1) == 1
    token_bitmask_kernel[(len(rows), cdiv(vocab_size, CHUNK))](
        logits,
        rows,
        bits,
        vocab_size,
        bits.shape[1],
        logits.stride(0),
        WORD=WORD,
        WORDS=CHUNK // WORD,
        num_warps=8,
    )


def token_bitmask_reference(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """Compute `token_bitmask` in numpy, whose calls take less time than torch's. The time does not depend on the bits.
    A NaN stays NaN."""
    values, mask_bytes, vocab_size = logits.numpy(), bits.numpy().view(np.uint8), logits.shape[1]
    block = max(1, BLOCK_TOKENS // vocab_size)
    for start in range(0, len(rows), block):
        chosen, block_bytes = rows[start : start + block].numpy(), mask_bytes[start : start + block]
        limits = _LIMITS_OF_BYTE.take(block_bytes, axis=0).reshape(len(chosen), -1)[:, :vocab_size]
        first, end = int(chosen[0]), int(chosen[-1]) + 1
        if end - first == len(chosen):  # adjacent rows are changed in place
            part = values[first:end]
            np.minimum(part, limits, out=part)
        else:
            values[chosen] = np.minimum(values[chosen], limits)


@kernel(do_not_specialize_on_alignment=["rows_ptr", "bits_ptr"])
def token_bitmask_kernel(
    logits_ptr,  # [all rows, vocab_size]
    rows_ptr,  # [masked rows] int64
    bits_ptr,  # [masked rows, num_words] int32
    vocab_size,
    num_words,
    stride_logits_row,
    WORD: tl.constexpr,
    WORDS: tl.constexpr,
):
    masked_row = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + masked_row)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    # [WORDS]
    bits = tl.load(bits_ptr + masked_row * num_words + word, mask=word < num_words, other=-1)
    bit = tl.arange(0, WORD)
    # [WORDS, WORD]
    token = word[:, None] * WORD + bit[None, :]
    is_forbidden = ((bits[:, None] >> bit[None, :]) & 1) == 0
    tl.store(logits_ptr + row * stride_logits_row + token, float("-inf"), mask=is_forbidden & (token < vocab_size))
