"""Draft tokens on the device. `propose_ngrams` writes them, `accept_drafts` counts those that are accepted.

N-gram speculation (prompt lookup decoding, Saxena 2023) proposes the tokens that followed an earlier equal n-gram.
Among all earlier positions whose last tokens equal the request's last tokens, the longest match wins (at most
`max_ngram`, at least `min_ngram` tokens), then the latest. Drafts are the tokens after the match. If they reach the end
of the request, copying continues with the drafts themselves, so repetitive text yields as many drafts as requested.

A row keeps the drafts that equal its samples, up to the first that differs. Both have one program for each row.
"""

import torch
import triton.language as tl

from proa_engine.kernels.launch import INTERPRETED, kernel, next_power_of_2

BLOCK = 2048  # tokens that `propose_ngrams` compares at a time
NONE = -1


def accept_drafts(
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    first_samples: torch.Tensor,
    drafts: torch.Tensor,
    lengths: torch.Tensor,
) -> torch.Tensor:
    """Return the numbers of accepted and of proposed draft tokens, [rows, 2] int64, and add each row's new tokens, the
    accepted draft tokens and one more, to lengths [slots] int64.

    token_ids and slots [samples] int64 are the step's samples and their slots. Row r's samples begin at
    first_samples[r], int64: one after its last known token, and one after each draft token. drafts [slots, width] int64
    has NONE where a slot has fewer.
    """
    if token_ids.is_cpu and not INTERPRETED:
        return accept_drafts_reference(token_ids, slots, first_samples, drafts, lengths)
    num_rows, width = len(first_samples), drafts.shape[1]
    assert token_ids.is_contiguous()
    assert drafts.is_contiguous()
    counts = torch.empty(num_rows, 2, dtype=torch.int64, device=token_ids.device)
    accept_drafts_kernel[(num_rows,)](
        token_ids,
        slots,
        first_samples,
        drafts,
        lengths,
        counts,
        len(token_ids),
        WIDTH=width,
        BLOCK_WIDTH=next_power_of_2(width),
        NONE_ID=NONE,
        num_warps=1,
    )
    return counts


def accept_drafts_reference(
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    first_samples: torch.Tensor,
    drafts: torch.Tensor,
    lengths: torch.Tensor,
) -> torch.Tensor:
    of_rows = slots[first_samples]
    proposed = drafts[of_rows]
    samples = (first_samples[:, None] + torch.arange(drafts.shape[1])).clamp_(max=len(token_ids) - 1)
    num_accepted = (token_ids[samples] == proposed).cumprod(1).sum(1)
    lengths.index_add_(0, of_rows, num_accepted + 1)
    return torch.stack((num_accepted, (proposed != NONE).sum(1)), dim=1)


@kernel(do_not_specialize=["num_samples"], do_not_specialize_on_alignment=["slots_ptr", "first_samples_ptr"])
def accept_drafts_kernel(
    token_ids_ptr,  # [num_samples] int64
    slots_ptr,  # [num_samples] int64
    first_samples_ptr,  # [rows] int64
    drafts_ptr,  # [slots, WIDTH] int64
    lengths_ptr,  # [slots] int64
    counts_ptr,  # [rows, 2] int64
    num_samples,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    NONE_ID: tl.constexpr,
):
    row = tl.program_id(0)
    first = tl.load(first_samples_ptr + row)
    slot = tl.load(slots_ptr + first)
    column = tl.arange(0, BLOCK_WIDTH)
    # [BLOCK_WIDTH]
    drafts = tl.load(drafts_ptr + slot * WIDTH + column, mask=column < WIDTH, other=NONE_ID)
    is_draft = drafts != NONE_ID
    samples = tl.load(token_ids_ptr + first + column, mask=is_draft & (first + column < num_samples), other=NONE_ID)
    num_accepted = tl.min(tl.where(is_draft & (samples == drafts), BLOCK_WIDTH, column), axis=0).to(tl.int64)
    tl.store(counts_ptr + 2 * row, num_accepted)
    tl.store(counts_ptr + 2 * row + 1, tl.sum(is_draft.to(tl.int64), axis=0))
    tl.store(lengths_ptr + slot, tl.load(lengths_ptr + slot) + num_accepted + 1)


def propose_ngrams(
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    lengths: torch.Tensor,
    drafts: torch.Tensor,
    *,
    min_ngram: int,
    max_ngram: int,
) -> None:
    """Write each row's draft tokens, and move the row to its request's true end.

    rows [3, R] int64 are slots, ends, and numbers of tokens: 1 and as many draft tokens as the row may have; 0 is
    padding. A request's tokens are the first lengths[slot] of token_ids[slot]. Draft tokens are written behind them,
    0 where there are fewer than the row may have, and to drafts[slot], which has NONE for the rest. Ends are upper
    bounds, in place replaced by the true ones. token_ids [slots, length] int32; lengths [slots] and
    drafts [slots, width] int64.
    """
    if rows.is_cpu and not INTERPRETED:
        propose_ngrams_reference(rows, token_ids, lengths, drafts, min_ngram=min_ngram, max_ngram=max_ngram)
        return
    num_rows, width = rows.shape[1], drafts.shape[1]
    assert rows.is_contiguous()
    assert token_ids.stride(1) == 1
    assert drafts.is_contiguous()
    propose_ngrams_kernel[(num_rows,)](
        rows,
        token_ids,
        lengths,
        drafts,
        num_rows,
        token_ids.stride(0),
        WIDTH=width,
        BLOCK_WIDTH=next_power_of_2(width),
        MIN_NGRAM=min_ngram,
        MAX_NGRAM=max_ngram,
        NONE_ID=NONE,
        BLOCK=BLOCK,
        num_warps=8,
    )


def propose_ngrams_reference(
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    lengths: torch.Tensor,
    drafts: torch.Tensor,
    *,
    min_ngram: int,
    max_ngram: int,
) -> None:
    slots, ends, num_tokens = rows
    is_row, drafted = num_tokens > 0, (num_tokens > 1).nonzero()[:, 0]
    true_ends = lengths.index_select(0, slots) + num_tokens - 1
    ends.copy_(torch.where(is_row, torch.minimum(ends, true_ends), ends))
    drafts.index_fill_(0, slots[is_row], NONE)
    if not len(drafted):
        return
    slots = slots[drafted]
    length = lengths[slots, None]
    tokens = token_ids[:, : int(length.max())].index_select(0, slots)  # [drafted, longest]
    place = torch.arange(tokens.shape[1])
    matches = place < length - 1  # positions where a match may end: before the last token
    common = torch.zeros_like(tokens)  # [drafted, longest]: how many tokens up to here equal the row's last ones
    for back in range(min(max_ngram, tokens.shape[1])):
        wanted = tokens.gather(1, (length - 1 - back).clamp(min=0))
        matches[:, back:] &= tokens[:, : tokens.shape[1] - back] == wanted
        matches[:, :back] = False
        common += matches
    best = common.amax(1, keepdim=True)
    end = torch.where(common == best, place, NONE).amax(1, keepdim=True)
    column = torch.arange(drafts.shape[1])
    period = (length - 1 - end).clamp(min=1)
    found = tokens.gather(1, (end + 1 + column % period).clamp(max=tokens.shape[1] - 1)).long()
    has_room = column < num_tokens[drafted, None] - 1
    found = torch.where((best >= min_ngram) & has_room, found, NONE)
    drafts.index_copy_(0, slots, found)
    token_ids[slots[:, None].expand_as(found)[has_room], (length + column)[has_room]] = (
        found[has_room].clamp(min=0).int()
    )


@kernel(
    do_not_specialize=["num_rows", "stride_token_ids_slot"],
    do_not_specialize_on_alignment=["rows_ptr"],
)
def propose_ngrams_kernel(
    rows_ptr,  # [3, num_rows] int64
    token_ids_ptr,  # [slots, …] int32
    lengths_ptr,  # [slots] int64
    drafts_ptr,  # [slots, WIDTH] int64
    num_rows,
    stride_token_ids_slot,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    MIN_NGRAM: tl.constexpr,
    MAX_NGRAM: tl.constexpr,
    NONE_ID: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    num_drafts = tl.load(rows_ptr + 2 * num_rows + row) - 1
    if num_drafts < 0:  # padding
        return
    slot = tl.load(rows_ptr + row)
    length = tl.load(lengths_ptr + slot).to(tl.int32)
    end_ptr = rows_ptr + num_rows + row
    tl.store(end_ptr, tl.minimum(tl.load(end_ptr), length + num_drafts))
    token_ids_ptr += slot * stride_token_ids_slot

    # Match length in the high bits, position in the low bits: the largest is the best match. Zero: no match.
    best = tl.zeros([BLOCK], tl.int64)
    num_places = tl.where(num_drafts > 0, length - 1, 0)
    for first in range(0, num_places, BLOCK):
        place = first + tl.arange(0, BLOCK)
        common = tl.zeros([BLOCK], tl.int64)
        matches = place < length - 1
        for back in tl.static_range(MAX_NGRAM):
            wanted = tl.load(token_ids_ptr + length - 1 - back, mask=back < length, other=NONE_ID)
            matches = matches & (place >= back)
            # [BLOCK]
            found = tl.load(token_ids_ptr + place - back, mask=matches, other=NONE_ID)
            matches = matches & (found == wanted)
            common += matches.to(tl.int64)
        best = tl.maximum(best, tl.where(common >= MIN_NGRAM, (common << 32) + place, 0))
    match = tl.max(best, axis=0)
    end = (match & 0xFFFFFFFF).to(tl.int32)

    column = tl.arange(0, BLOCK_WIDTH)
    has_room = column < num_drafts
    source = end + 1 + column % tl.maximum(length - 1 - end, 1)
    # [BLOCK_WIDTH]
    drafts = tl.load(token_ids_ptr + source, mask=has_room & (match > 0), other=NONE_ID)
    tl.store(drafts_ptr + slot * WIDTH + column, drafts.to(tl.int64), mask=column < WIDTH)
    tl.store(token_ids_ptr + length + column, tl.maximum(drafts, 0), mask=has_room)
