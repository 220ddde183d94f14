"""Gumbel noise as a pure function of (key, absolute position, token id): a counter-based generator without state.

A token's noise does not depend on the batch, the device or the number of calls. All mixing is of 32-bit words with
wrapping products, so that CPUs, GPUs and other engines compute the same words; tests/unit/kernels has test vectors.

The mixer is "lowbias32" (Chris Wellons, https://nullprogram.com/blog/2018/07/31/). The key and the position are mixed
to two words once for each row. Each token then costs one mixing: the first word is added at its start, the second in
its middle.
"""

import torch
from torch import Tensor

_MULTIPLIER_1 = 0x7FEB352D
_MULTIPLIER_2 = 0x846CA68B - 2**32  # as a signed word
_START_A = 0x243F6A88  # digits of pi: an arbitrary constant that was not tuned
_START_B = 0x13198A2E


def row_words(key_lo: Tensor, key_hi: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Halves of the keys and positions, [rows] int32 bit patterns each -> the two words of each row, [rows] int32."""
    a = _mix(key_lo ^ _START_A)
    a = _mix(a ^ key_hi)
    a = _mix(a ^ position)
    b = _mix(key_hi ^ _START_B)
    b = _mix(b ^ key_lo)
    b = _mix(b + position)
    return a, b


def random_words(a: Tensor, b: Tensor, token_ids: Tensor) -> Tensor:
    """The rows' words [rows] int32, token ids [tokens] int32 -> a word for each row and token, [rows, tokens] int32."""
    words = a[:, None] ^ token_ids[None, :]
    scratch = torch.empty_like(words)
    _xor_shifted(words, 16, scratch)
    words.mul_(_MULTIPLIER_1).add_(b[:, None])
    _xor_shifted(words, 15, scratch)
    words.mul_(_MULTIPLIER_2)
    _xor_shifted(words, 16, scratch)
    return words


def gumbel(key_lo: Tensor, key_hi: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
    """Rows' words [rows] int32, token ids [tokens] int32 -> standard Gumbel noise [rows, tokens] float32.

    The uniform variate has 31 bits and enters as log1p(-u). The largest noise comes from the end where that is finest,
    so that two tokens of a large vocabulary rarely get equal noise.
    """
    words = random_words(*row_words(key_lo, key_hi, position), token_ids).bitwise_and_(0x7FFFFFFF)
    negative_uniform = words.float().add_(0.5).mul_(-(2.0**-31)).clamp_(min=-(1 - 2.0**-24))
    return negative_uniform.log1p_().neg_().log_().neg_()


def _mix(words: Tensor) -> Tensor:
    words = words.clone()
    scratch = torch.empty_like(words)
    _xor_shifted(words, 16, scratch)
    words.mul_(_MULTIPLIER_1)
    _xor_shifted(words, 15, scratch)
    words.mul_(_MULTIPLIER_2)
    _xor_shifted(words, 16, scratch)
    return words


def _xor_shifted(words: Tensor, shift: int, scratch: Tensor) -> None:
    """words ^= words >>> shift, in place; the mask makes torch's arithmetic shift a logical one."""
    torch.bitwise_right_shift(words, shift, out=scratch)
    scratch.bitwise_and_((1 << (32 - shift)) - 1)
    words.bitwise_xor_(scratch)
