"""N-gram speculation (prompt lookup decoding, Saxena 2023): propose the tokens that followed an earlier equal n-gram.

Among all earlier positions whose last tokens equal the request's last tokens, the longest match wins (at most
`max_ngram`, at least `min_ngram` tokens), then the latest. Drafts are the tokens after the match. If they reach the end
of the request, copying continues with the drafts themselves, so repetitive text yields as many drafts as requested.

One program for each row, which reads the row's tokens once.
"""

import torch
import triton
import triton.language as tl

BLOCK = 2048
NONE = -1


def propose_ngrams(
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    num_drafts: torch.Tensor,
    *,
    width: int,
    max_length: int,
    min_ngram: int,
    max_ngram: int,
) -> torch.Tensor:
    """Return draft tokens [rows, width] int64: num_drafts[r] for row r if it has a match; the rest is NONE.

    Row r's tokens are the first lengths[slots[r]] of token_ids[slots[r]]. token_ids [slots, length] int32; lengths
    [slots], slots [rows] and num_drafts [rows] int64. `max_length` is an upper bound of the rows' lengths that the host
    knows.
    """
    if token_ids.is_cpu:
        return propose_ngrams_reference(
            token_ids,
            slots,
            lengths,
            num_drafts,
            width=width,
            max_length=max_length,
            min_ngram=min_ngram,
            max_ngram=max_ngram,
        )
    return _propose_ngrams_triton(
        token_ids, slots, lengths, num_drafts, width=width, min_ngram=min_ngram, max_ngram=max_ngram
    )


def propose_ngrams_reference(
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    num_drafts: torch.Tensor,
    *,
    width: int,
    max_length: int,
    min_ngram: int,
    max_ngram: int,
) -> torch.Tensor:
    tokens = token_ids[:, :max_length].index_select(0, slots)  # [rows, max_length]
    length = lengths.index_select(0, slots)[:, None]
    place = torch.arange(tokens.shape[1], device=tokens.device)
    matches = place < length - 1  # positions where a match may end: before the last token
    common = torch.zeros_like(tokens)  # [rows, max_length]: how many tokens up to here equal the row's last ones
    for back in range(min(max_ngram, tokens.shape[1])):
        wanted = tokens.gather(1, (length - 1 - back).clamp(min=0))
        matches[:, back:] &= tokens[:, : tokens.shape[1] - back] == wanted
        matches[:, :back] = False
        common += matches
    best = common.amax(1, keepdim=True)
    end = torch.where(common == best, place, NONE).amax(1, keepdim=True)
    column = torch.arange(width, device=tokens.device)
    period = (length - 1 - end).clamp(min=1)
    drafts = tokens.gather(1, (end + 1 + column % period).clamp(max=tokens.shape[1] - 1)).long()
    return torch.where((best >= min_ngram) & (column < num_drafts[:, None]), drafts, NONE)


def _propose_ngrams_triton(
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    num_drafts: torch.Tensor,
    *,
    width: int,
    min_ngram: int,
    max_ngram: int,
) -> torch.Tensor:
    assert token_ids.stride(1) == 1
    drafts = torch.empty(len(slots), width, dtype=torch.int64, device=token_ids.device)
    propose_ngrams_kernel[(len(slots),)](
        token_ids,
        slots,
        lengths,
        num_drafts,
        drafts,
        token_ids.stride(0),
        WIDTH=width,
        BLOCK_WIDTH=triton.next_power_of_2(width),
        MIN_NGRAM=min_ngram,
        MAX_NGRAM=max_ngram,
        NONE_ID=NONE,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return drafts


@triton.jit(
    do_not_specialize=["stride_token_ids_slot"],
    do_not_specialize_on_alignment=["slots_ptr", "num_drafts_ptr"],
)
def propose_ngrams_kernel(
    token_ids_ptr,  # [slots, …] int32
    slots_ptr,  # [rows] int64
    lengths_ptr,  # [slots] int64
    num_drafts_ptr,  # [rows] int64
    drafts_ptr,  # [rows, WIDTH] int64
    stride_token_ids_slot,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    MIN_NGRAM: tl.constexpr,
    MAX_NGRAM: tl.constexpr,
    NONE_ID: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    length = tl.load(lengths_ptr + slot).to(tl.int32)
    num_drafts = tl.load(num_drafts_ptr + row)
    token_ids_ptr += slot * stride_token_ids_slot

    # Match length in the high bits, position in the low bits: the largest is the best match. Zero: no match.
    best = tl.zeros([BLOCK], tl.int64)
    for first in range(0, length - 1, BLOCK):
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
    is_draft = (match > 0) & (column < num_drafts)
    source = end + 1 + column % tl.maximum(length - 1 - end, 1)
    drafts = tl.load(token_ids_ptr + source, mask=is_draft, other=NONE_ID)
    tl.store(drafts_ptr + row * WIDTH + column, drafts.to(tl.int64), mask=column < WIDTH)
