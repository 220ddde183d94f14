"""Operations on logits before and after a token is chosen: penalties, limits, sampling, log probabilities.

A row's result does not depend on the other rows. Logits are [rows, vocab] float32.

The Gumbel noise is a pure function of (key, absolute position, token id): a counter-based generator without state. A
token's noise does not depend on the batch or the number of calls. All mixing is of 32-bit words with wrapping products,
so that CPUs, GPUs and other engines compute the same words; tests/unit/kernels has test vectors. The logarithms of a
word are the device's own: a GPU's noise is within 1e-5 of this (`draw_tokens`).
The mixer is "lowbias32" (Chris Wellons, https://nullprogram.com/blog/2018/07/31/). The key and the position are mixed
to two words once for each row. Each token then costs one mixing: the first word is added at its start, the second in
its middle.
"""

import math

import torch
from torch import Tensor

_MULTIPLIER_1 = 0x7FEB352D
_MULTIPLIER_2 = 0x846CA68B - 2**32  # as a signed word
_START_A = 0x243F6A88  # digits of pi: an arbitrary constant that was not tuned
_START_B = 0x13198A2E

# If a row keeps at most this many tokens, the vocabulary is not sorted.
_NUM_CANDIDATES = 128


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


def apply_penalties(
    logits: Tensor,  # changed in place
    token_ids: Tensor,  # [rows, length] int64: prompt, then output, then anything; below 0: no token
    num_prompt_tokens: Tensor,  # [rows] int64
    num_tokens: Tensor,  # [rows] int64: prompt and output together
    repetition: Tensor,  # [rows] float32
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Apply, in place, repetition penalty (Keskar et al. 2019) over prompt and output, then OpenAI's two over the
    output."""
    vocab_size = logits.shape[1]
    place = torch.arange(token_ids.shape[1], device=logits.device)
    is_token = (place < num_tokens[:, None]) & (token_ids >= 0)
    is_output = is_token & (place >= num_prompt_tokens[:, None])
    ids = token_ids.masked_fill(~is_token, 0)
    seen = logits.new_zeros(logits.shape[0], vocab_size).scatter_add_(1, ids, is_token.float())
    counts = logits.new_zeros(logits.shape[0], vocab_size).scatter_add_(1, ids, is_output.float())
    penalty = repetition[:, None]
    repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
    logits.copy_(torch.where(seen > 0, repeated, logits))
    logits.sub_(counts * frequency[:, None]).sub_((counts > 0).float() * presence[:, None])


def apply_min_p(logits: Tensor, min_p: Tensor) -> None:
    """Mask, in place, tokens of logits [rows, vocab] less likely than min_p [rows] float32 times the likeliest."""
    floor = logits.amax(-1) + min_p.log()
    logits.masked_fill_(logits < floor[:, None], -math.inf)


def apply_top_k_top_p(logits: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Keep, in place, the top_k likeliest tokens of each row, and of those the fewest whose probabilities sum to top_p.

    top_k is [rows] int64, at least 1 (the vocabulary's size: all); top_p is [rows] float32. Tokens that equal the last
    one kept are kept too.
    """
    vocab_size = logits.shape[1]
    num_candidates = min(_NUM_CANDIDATES, vocab_size)
    candidates = logits.topk(num_candidates).values
    threshold, found = _threshold(candidates, logits.logsumexp(-1), top_k, top_p, vocab_size)
    if num_candidates < vocab_size and not bool(found.all()):
        rows = (~found).nonzero().squeeze(1)
        ordered = logits[rows].sort(descending=True).values
        threshold[rows] = _threshold(ordered, ordered.logsumexp(-1), top_k[rows], top_p[rows], vocab_size)[0]
    logits.masked_fill_(logits < threshold[:, None], -math.inf)


def _threshold(
    ordered: Tensor, log_total: Tensor, top_k: Tensor, top_p: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """The least logit that is kept, [rows], and whether `ordered`, the head of the sorted row, was enough to tell."""
    length = ordered.shape[1]
    least = ordered.gather(1, top_k.clamp(max=length)[:, None] - 1)
    in_top_k = ordered >= least
    within = ordered.masked_fill(~in_top_k, -math.inf)
    total = torch.where(top_k < vocab_size, within.logsumexp(-1), log_total)
    probabilities = (within - total[:, None]).exp()
    before = probabilities.cumsum(-1) - probabilities
    kept = in_top_k & ((before < top_p[:, None]) | (top_p >= 1)[:, None])
    kept[:, 0] = True
    last = kept.sum(-1, keepdim=True) - 1
    # The last of the head may have equals behind it.
    has_top_k = (top_k <= length) & (ordered[:, -1] < least[:, 0])
    found = torch.where(top_k < vocab_size, has_top_k, last.squeeze(1) < length - 1)
    return ordered.gather(1, last).squeeze(1), found


def greedy(logits: Tensor) -> Tensor:
    """logits [rows, vocab] -> the likeliest token of each row, [rows] int64; among equal values the lowest id."""
    if logits.is_cuda:
        return logits.argmax(-1)
    return torch.from_numpy(logits.numpy().argmax(-1))  # vectorised, torch's is not: 7 times faster at 64 x 4096


def sample(logits: Tensor, key_lo: Tensor, key_hi: Tensor, position: Tensor) -> Tensor:
    """Sample a token of softmax(logits) for each row, [rows] int64, with the Gumbel-max trick.

    `position` is the absolute position of the new token; keys and positions are [rows] int32.
    """
    token_ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    return greedy(gumbel(key_lo, key_hi, position, token_ids).add_(logits))


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log probability and rank of each row's token, [rows] each, and the num_top likeliest ids and values, [rows,
    num_top].

    Ranks start at 1; tokens of equal probability share the better rank.
    """
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    top = logprobs.topk(min(num_top, logits.shape[1]))
    return chosen.squeeze(1), ranks, top.indices, top.values


def named_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Log probabilities of each row's token ids, [rows, width] int64, as such a tensor: those of `token_logprobs`."""
    return logits.log_softmax(-1).gather(1, token_ids)
