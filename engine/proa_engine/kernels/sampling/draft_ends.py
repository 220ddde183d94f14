"""What the end of a step keeps for the drafts of the next one, a launch each.

compare_drafts  which ways to draw would have proposed the samples, counted by range of temperatures
next_token_ids  the tokens behind those of a step of decodes
keep_reads      what each request's last entry reads
"""

import torch
import triton.language as tl
from torch import Tensor

from proa_engine.kernels.launch import INTERPRETED, begin, cdiv, kernel, next_power_of_2
from proa_engine.kernels.sampling.draft_rows import range_of
from proa_engine.kernels.sampling.draft_state import DraftState
from proa_engine.kernels.sampling.drafts import NONE
from proa_engine.kernels.sampling.sampling_params import NUM_COLUMNS, TEMPERATURE

DECAY = 0.999  # of the counts of `DraftState.matches`, by step with drafts
COMPARED = 64  # rows at a time
BLOCK = 1024  # values of a state
_NONE = tl.constexpr(NONE)


def compare_drafts(token_ids: Tensor, slots: Tensor, first_samples: Tensor, state: DraftState) -> Tensor:
    """Which ways would have proposed the first sample of each row: 1 for those, [rows, W] int64, which are also added
    to `state.matches`. For rows without drafts in this step all are 0.

    token_ids and slots [samples] int64 are the step's samples and their slots, first_samples [rows] int64 the first one
    of each row.
    """
    if state.is_host:
        return compare_drafts_reference(token_ids, slots, first_samples, state)
    num_rows, num_ways, device = len(first_samples), len(state.factors), token_ids.device
    matches = torch.empty(num_rows, num_ways, dtype=torch.int64, device=device)
    compare_drafts_kernel[(1,)](
        token_ids,
        slots,
        first_samples,
        state.drafts,
        state.first,
        state.params,
        state.bounds,
        state.matches,
        matches,
        num_rows,
        state.drafts.shape[1],
        NUM_BOUNDS=len(state.bounds),
        BLOCK_RANGES=next_power_of_2(len(state.bounds) + 1),
        NUM_WAYS=num_ways,
        BLOCK_WAYS=next_power_of_2(num_ways),
        TEMPERATURE=TEMPERATURE,
        NUM_COLUMNS=NUM_COLUMNS,
        DECAY=DECAY,
        BLOCK_ROWS=COMPARED,
        num_warps=2,
    )
    return matches


def compare_drafts_reference(token_ids: Tensor, slots: Tensor, first_samples: Tensor, state: DraftState) -> Tensor:
    of_rows, samples = slots[first_samples], token_ids[first_samples]
    has_drafts = state.drafts[of_rows, 0] != NONE
    matches = (state.first[of_rows] == samples[:, None]) & has_drafts[:, None]
    ranges = torch.bucketize(state.params[of_rows, TEMPERATURE], state.bounds, right=True)
    state.matches.mul_(DECAY).index_add_(0, ranges, matches.double())
    return matches.long()


@kernel(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["token_ids_ptr", "slots_ptr", "first_samples_ptr"],
)
def compare_drafts_kernel(
    token_ids_ptr,  # [samples] int64
    slots_ptr,  # [samples] int64
    first_samples_ptr,  # [num_rows] int64
    drafts_ptr,  # [slots + 1, max_drafts] int64
    first_ptr,  # [slots + 1, NUM_WAYS] int64
    params_ptr,  # [slots, NUM_COLUMNS] float64
    bounds_ptr,  # [NUM_BOUNDS] float64
    counts_ptr,  # [NUM_BOUNDS + 1, NUM_WAYS] float64
    matches_ptr,  # [num_rows, NUM_WAYS] int64
    num_rows,
    max_drafts,
    NUM_BOUNDS: tl.constexpr,
    BLOCK_RANGES: tl.constexpr,
    NUM_WAYS: tl.constexpr,
    BLOCK_WAYS: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    DECAY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    each_range = tl.arange(0, BLOCK_RANGES)[:, None]
    way = tl.arange(0, BLOCK_WAYS)[None, :]
    is_way = way < NUM_WAYS
    is_count = (each_range <= NUM_BOUNDS) & is_way
    counts_ptr += each_range * NUM_WAYS + way
    # [BLOCK_RANGES, BLOCK_WAYS]
    counts = tl.load(counts_ptr, mask=is_count, other=0.0) * DECAY
    for start in range(0, num_rows, BLOCK_ROWS):
        row = (start + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        is_row = row < num_rows
        sample = tl.load(first_samples_ptr + row, mask=is_row, other=0)
        slot = tl.load(slots_ptr + sample, mask=is_row, other=0)
        token = tl.load(token_ids_ptr + sample, mask=is_row, other=0)
        has_drafts = is_row & (tl.load(drafts_ptr + slot * max_drafts, mask=is_row, other=_NONE) != _NONE)
        # [BLOCK_ROWS, BLOCK_WAYS]
        mask = is_row[:, None] & is_way
        first = tl.load(first_ptr + slot[:, None] * NUM_WAYS + way, mask=mask, other=_NONE)
        matches = has_drafts[:, None] & is_way & (first == token[:, None])
        tl.store(matches_ptr + row[:, None] * NUM_WAYS + way, matches.to(tl.int64), mask=mask)
        temperature = tl.load(params_ptr + slot * NUM_COLUMNS + TEMPERATURE, mask=is_row, other=0.0)
        ranges = range_of(temperature, bounds_ptr, NUM_BOUNDS)
        in_range = each_range[:, None, :] == ranges[None, :, None]  # [BLOCK_RANGES, BLOCK_ROWS, 1]
        counts += tl.sum((in_range & matches[None, :, :]).to(tl.float64), axis=1)
    tl.store(counts_ptr, counts, mask=is_count)


def next_token_ids(rows: Tensor, token_ids: Tensor, width: int) -> Tensor:
    """The tokens behind each of the `width` tokens of a step's rows, [R * width] int64, of padding any that there is.

    rows [3, R] int64 are as `decode_inputs` takes them. token_ids [slots, length] int32, in which -1 stands for an
    embedding.
    """
    num_rows = rows.shape[1]
    assert rows.is_contiguous()
    if rows.is_cpu and not INTERPRETED:
        behind = (rows[1][:, None] - torch.arange(width - 1, -1, -1)).clamp(min=0)
        return token_ids[rows[0][:, None], behind].long().clamp(min=0).view(-1)
    found = torch.empty(num_rows * width, dtype=torch.int64, device=rows.device)
    next_token_ids_kernel[(num_rows,)](
        rows,
        token_ids,
        found,
        num_rows,
        token_ids.shape[1],
        WIDTH=width,
        BLOCK_WIDTH=next_power_of_2(width),
        num_warps=1,
    )
    return found


@kernel(do_not_specialize=["num_rows", "token_width"], do_not_specialize_on_alignment=["rows_ptr"])
def next_token_ids_kernel(
    rows_ptr,  # [3, num_rows] int64
    token_ids_ptr,  # [slots, token_width] int32
    found_ptr,  # [num_rows, WIDTH] int64
    num_rows,
    token_width,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows_ptr + row)
    end = tl.load(rows_ptr + num_rows + row)
    column = tl.arange(0, BLOCK_WIDTH)
    behind = tl.maximum(end - (WIDTH - 1) + column, 0)
    mask = column < WIDTH
    found = tl.load(token_ids_ptr + slot * token_width + behind, mask=mask, other=0)
    tl.store(found_ptr + row * WIDTH + column, tl.maximum(found, 0).to(tl.int64), mask=mask)


def keep_reads(
    read: Tensor, slots: Tensor, query_start_loc: Tensor, seq_lens: Tensor, state: DraftState, carry: Tensor
) -> None:
    """Copy what the entries of the rows' last true tokens read to `carry`, and let their slots have drafts.

    read [T, size] is of the step's tokens, those of row r from query_start_loc[r] to query_start_loc[r + 1] (int32),
    which end at seq_lens[r] (int32) of the request in slot slots[r] (int64), rejected draft tokens included; 0: the row
    is padding. carry [slots + 1, size].
    """
    num_rows, size = len(slots), read.shape[1]
    assert read.stride(1) == 1
    assert carry.is_contiguous()
    if state.is_host:
        num_behind = (seq_lens - state.lengths[slots] + 1).clamp(min=0)
        homes = torch.where(seq_lens > 0, slots, len(state.lengths))
        carry[homes] = read[query_start_loc[1:] - 1 - num_behind]
        state.can_draft[homes] = 1
        return
    keep_reads_kernel[(num_rows, cdiv(size, BLOCK))](
        read,
        slots,
        query_start_loc,
        seq_lens,
        state.lengths,
        state.can_draft,
        carry,
        len(state.lengths),
        size,
        read.stride(0),
        BLOCK=BLOCK,
        num_warps=4,
    )


@kernel(
    do_not_specialize=["num_slots"],
    do_not_specialize_on_alignment=["slots_ptr", "query_start_loc_ptr", "seq_lens_ptr"],
)
def keep_reads_kernel(
    read_ptr,  # [tokens, size]
    slots_ptr,  # [rows] int64
    query_start_loc_ptr,  # [rows + 1] int32
    seq_lens_ptr,  # [rows] int32
    lengths_ptr,  # [num_slots] int64
    can_draft_ptr,  # [num_slots + 1] int64
    carry_ptr,  # [num_slots + 1, size]
    num_slots,
    size,
    stride_read_token,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    seq_len = tl.load(seq_lens_ptr + row)
    num_behind = tl.maximum(seq_len - tl.load(lengths_ptr + slot) + 1, 0)  # rejected draft tokens
    last = tl.load(query_start_loc_ptr + row + 1) - 1 - num_behind
    home = tl.where(seq_len > 0, slot, num_slots)
    place = part * BLOCK + tl.arange(0, BLOCK)
    read = tl.load(read_ptr + last * stride_read_token + place, mask=place < size, other=0.0)
    tl.store(carry_ptr + home * size + place, read, mask=place < size)
    if part == 0:
        tl.store(can_draft_ptr + home, tl.full([], 1, tl.int64))
