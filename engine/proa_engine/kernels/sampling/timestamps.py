"""Whisper's rules for timestamps (Radford et al., 2022, arXiv 2212.04356, section 3.2), as `transformers` has them
(`WhisperTimeStampLogitsProcessor`): timestamps come in pairs, do not go back, and the first token is one."""

import math

import torch
from torch import Tensor

NUM_VALUES = 4


def apply_timestamps(
    logits: Tensor, token_ids: Tensor, num_prompt_tokens: Tensor, num_tokens: Tensor, values: Tensor
) -> None:
    """Forbid tokens in logits [rows, vocab] float32, in place.

    token_ids [rows, width]: the first `num_tokens` [rows] int64 are the request's tokens, of which `num_prompt_tokens`
    [rows] int64 are the prompt's. values [NUM_VALUES, rows] int64 are the ids of the first timestamp, of the token for
    no timestamps, of the end, below which tokens are text, and of the largest first timestamp.
    """
    begin, no_timestamps, end, max_initial = values[:, :, None].unbind(0)
    ids = torch.arange(logits.shape[1], device=logits.device)
    num_output = (num_tokens - num_prompt_tokens)[:, None]
    is_first = num_output == 0
    before = _token_at(token_ids, num_tokens - 1), _token_at(token_ids, num_tokens - 2)
    follows = (before[0] >= begin) & ~is_first  # the token before is a timestamp:
    closes = follows & ((before[1] >= begin) | (num_output < 2))  # the second of a pair, or the output's first token
    opens = follows & ~closes
    last = _last_timestamp(token_ids, begin, num_prompt_tokens, num_tokens)
    least = torch.where(last < 0, begin, torch.where(opens, last, last + 1))
    is_timestamp = ids >= begin
    forbidden = ids == no_timestamps
    forbidden |= is_timestamp & (closes | (ids < least))
    forbidden |= opens & (ids < end)
    forbidden |= is_first & (~is_timestamp | (ids > max_initial))
    logits.masked_fill_(forbidden, -math.inf)
    timestamps = logits.masked_fill(~is_timestamp, -math.inf).logsumexp(1, keepdim=True)
    best_text = logits.masked_fill(is_timestamp, -math.inf).amax(1, keepdim=True)
    logits.masked_fill_((timestamps > best_text) & ~is_timestamp, -math.inf)


def _token_at(token_ids: Tensor, positions: Tensor) -> Tensor:
    """The token at each row's position, [rows, 1]; that at 0 before the first."""
    return token_ids.gather(1, positions.clamp(min=0)[:, None])


def _last_timestamp(token_ids: Tensor, begin: Tensor, num_prompt_tokens: Tensor, num_tokens: Tensor) -> Tensor:
    """The last timestamp of each row's output, [rows, 1]; -1 if there is none."""
    positions = torch.arange(token_ids.shape[1], device=token_ids.device)
    in_output = (positions >= num_prompt_tokens[:, None]) & (positions < num_tokens[:, None])
    places = positions.masked_fill(~(in_output & (token_ids >= begin)), -1).amax(1)
    return _token_at(token_ids, places).masked_fill(places[:, None] < 0, -1)
