"""Acceptance of draft tokens: a row keeps the drafts that equal its samples, up to the first that differs.

One program for each row.
"""

import torch
import triton.language as tl

from proa_engine.kernels.launch import kernel
from proa_engine.kernels.ngram import NONE
from proa_engine.kernels.sizes import next_power_of_2


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
    if token_ids.is_cpu:
        return accept_drafts_reference(token_ids, slots, first_samples, drafts, lengths)
    return _accept_drafts_triton(token_ids, slots, first_samples, drafts, lengths)


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


def _accept_drafts_triton(
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    first_samples: torch.Tensor,
    drafts: torch.Tensor,
    lengths: torch.Tensor,
) -> torch.Tensor:
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
