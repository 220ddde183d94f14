"""make_replay: which tokens a step's rows compute again, and of how many tokens the states are that they write."""

import torch
import triton.language as tl

from proa_engine.kernels.launch import INTERPRETED, cdiv, kernel
from proa_engine.kernels.states.state_rows import Replay

BLOCK = 128


def make_replay(
    positions: torch.Tensor,
    slots: torch.Tensor,
    ends: torch.Tensor,
    num_tokens: torch.Tensor,
    num_samples: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    width: int,
    num_rows: int,
) -> Replay:
    """Return the rows' `Replay`, and store in `positions` the positions of the states that the rows write: before the
    row if it has drafts, otherwise at its end.

    positions [slots] int32: tokens before each request's state; the last one belongs to padding, which has no tokens
    and the end 0. slots, ends and num_tokens [R] are integers of any type: a row computes `num_tokens` tokens before
    its end, which are the last ones of the row in the batch. Rows with several samples, num_samples [R], have drafts.
    query_start_loc [R + 1] as in `AttentionMetadata`, the rest as in
    `Replay`.
    """
    if slots.is_cpu and not INTERPRETED:
        columns = _reference(positions, slots, ends, num_tokens, num_samples, query_start_loc)
    else:
        columns = torch.empty(4, len(slots), dtype=torch.int32, device=slots.device)
        replay_rows_kernel[(cdiv(len(slots), BLOCK),)](
            positions,
            slots,
            ends,
            num_tokens,
            num_samples,
            query_start_loc,
            columns,
            len(slots),
            positions.shape[0] - 1,
            BLOCK=BLOCK,
            num_warps=4,
        )
    of_slots, num_pending, num_kept, starts = columns
    return Replay(of_slots, num_pending, num_kept, starts, width, num_rows)


def _reference(
    positions: torch.Tensor,
    slots: torch.Tensor,
    ends: torch.Tensor,
    num_tokens: torch.Tensor,
    num_samples: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> torch.Tensor:
    num_kept = torch.where(num_samples > 1, num_tokens, 0)
    slots = torch.where(num_tokens > 0, slots, len(positions) - 1).long()
    first = ends - num_tokens
    num_pending = first - positions.index_select(0, slots)
    positions.index_copy_(0, slots, torch.where(num_kept > 0, first, ends).int())
    return torch.stack((slots, num_pending, num_kept, query_start_loc[1:] - num_tokens)).int()


@kernel(
    do_not_specialize=["num_rows", "padding_slot"],
    do_not_specialize_on_alignment=["slots_ptr", "ends_ptr", "num_tokens_ptr", "num_samples_ptr"],
)
def replay_rows_kernel(
    positions_ptr,  # [padding_slot + 1] int32
    slots_ptr,  # [num_rows]
    ends_ptr,  # [num_rows]
    num_tokens_ptr,  # [num_rows]
    num_samples_ptr,  # [num_rows]
    query_start_loc_ptr,  # [num_rows + 1]
    columns_ptr,  # [4, num_rows] int32: slots, num_pending, num_kept, starts
    num_rows,
    padding_slot,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    # [BLOCK]
    num_tokens = tl.load(num_tokens_ptr + row, mask=mask, other=0).to(tl.int32)
    end = tl.load(ends_ptr + row, mask=mask, other=0).to(tl.int32)
    slot = tl.load(slots_ptr + row, mask=mask, other=0).to(tl.int32)
    num_kept = tl.where(tl.load(num_samples_ptr + row, mask=mask, other=0) > 1, num_tokens, 0)
    is_padding = num_tokens == 0
    slot = tl.where(is_padding, padding_slot, slot)
    first = end - num_tokens
    position = tl.load(positions_ptr + slot, mask=mask & ~is_padding, other=0)
    tl.store(positions_ptr + slot, tl.where(num_kept > 0, first, end), mask=mask & ~is_padding)
    row_end = tl.load(query_start_loc_ptr + row + 1, mask=mask, other=0)
    tl.store(columns_ptr + row, slot, mask=mask)
    tl.store(columns_ptr + num_rows + row, tl.where(is_padding, 0, first - position), mask=mask)
    tl.store(columns_ptr + 2 * num_rows + row, num_kept, mask=mask)
    tl.store(columns_ptr + 3 * num_rows + row, row_end - num_tokens, mask=mask)
