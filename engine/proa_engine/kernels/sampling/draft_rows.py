"""A step's draft tokens by a drafter, place after place: all but the drafter's layers and the draws, a launch each.

    settle_rows     rows move to their requests' true ends
    begin_drafts    what the rows draft with, and what the entry before the first draft token reads
    add_drafts      the draft tokens of a place are stored, and the next place is prepared

Nothing is read by the host, so that all can be captured. A row without tokens is a graph's padding: it reads slot 0 and
writes the last row of `DraftState`'s tables. `draft_ends` has what the end of a step does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa_engine.kernels.launch import begin, kernel, next_power_of_2
from proa_engine.kernels.sampling.draft_state import DraftPlace, DraftRows, DraftState
from proa_engine.kernels.sampling.drafts import NONE
from proa_engine.kernels.sampling.sampling_params import NUM_COLUMNS, TEMPERATURE

_NONE = tl.constexpr(NONE)


def settle_rows(rows: Tensor, state: DraftState) -> None:
    """Move rows to their requests' true ends, and forget the draft tokens of their slots.

    rows [3, R] int64 are slots, ends, which are upper bounds and in place replaced by the true ones, and numbers of
    tokens: one, and as many draft tokens as the row may have.
    """
    assert rows.is_contiguous()
    if state.is_host:
        slots, ends, counts = rows
        ends.copy_(torch.minimum(ends, (state.lengths[slots] + counts - 1).clamp(min=0)))
        state.drafts[_homes(slots, counts, state)] = NONE
        return
    width = state.drafts.shape[1]
    settle_rows_kernel[(rows.shape[1],)](
        rows,
        state.lengths,
        state.drafts,
        rows.shape[1],
        len(state.lengths),
        WIDTH=width,
        BLOCK_WIDTH=next_power_of_2(width),
        num_warps=1,
    )


@kernel(do_not_specialize=["num_rows", "num_slots"], do_not_specialize_on_alignment=["rows_ptr"])
def settle_rows_kernel(
    rows_ptr,  # [3, num_rows] int64
    lengths_ptr,  # [num_slots] int64
    drafts_ptr,  # [num_slots + 1, WIDTH] int64
    num_rows,
    num_slots,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0)
    slot = tl.load(rows_ptr + row)
    end_ptr = rows_ptr + num_rows + row
    count = tl.load(rows_ptr + 2 * num_rows + row)
    true_end = tl.maximum(tl.load(lengths_ptr + slot) + count - 1, 0)
    tl.store(end_ptr, tl.minimum(tl.load(end_ptr), true_end))
    home = tl.where(count > 0, slot, num_slots)
    column = tl.arange(0, BLOCK_WIDTH)
    nothing = tl.full([BLOCK_WIDTH], _NONE, tl.int64)
    tl.store(drafts_ptr + home * WIDTH + column, nothing, mask=column < WIDTH)


def begin_drafts(rows: Tensor, state: DraftState) -> tuple[DraftRows, DraftPlace]:
    """rows [3, D] int64 as `settle_rows` takes them -> the same rows, and the first place of their draft tokens.

    Of the ways, each row uses the one that matched most often at its range of temperatures; the first among equals.
    """
    if state.is_host:
        return begin_drafts_reference(rows, state)
    assert rows.is_contiguous()
    num_rows, num_ways, device = rows.shape[1], len(state.factors), rows.device
    begun = DraftRows(
        torch.empty(7, num_rows, dtype=torch.int64, device=device),
        torch.empty(num_ways + 1, num_rows, NUM_COLUMNS, dtype=torch.float64, device=device),
    )
    place = DraftPlace(torch.empty(5, num_rows, dtype=torch.int64, device=device))
    begin_drafts_kernel[(num_rows,)](
        rows,
        state.token_ids,
        state.lengths,
        state.can_draft,
        state.params,
        state.factors,
        state.bounds,
        state.matches,
        begun.values,
        begun.params,
        place.values,
        num_rows,
        len(state.lengths),
        state.token_ids.shape[1],
        NUM_BOUNDS=len(state.bounds),
        NUM_WAYS=num_ways,
        BLOCK_WAYS=next_power_of_2(num_ways),
        TEMPERATURE=TEMPERATURE,
        NUM_COLUMNS=NUM_COLUMNS,
        BLOCK_COLUMNS=next_power_of_2(NUM_COLUMNS),
        num_warps=1,
    )
    return begun, place


def begin_drafts_reference(rows: Tensor, state: DraftState) -> tuple[DraftRows, DraftPlace]:
    slots, _, counts = rows
    lengths = state.lengths[slots]
    room = (counts - 1) * state.can_draft[slots]
    params = state.params[slots]
    temperatures = params[:, TEMPERATURE].contiguous()
    best = state.matches.argmax(dim=1)[torch.bucketize(temperatures, state.bounds, right=True)]
    by_way = params.expand(len(state.factors) + 1, *params.shape).clone()
    by_way[:-1, :, TEMPERATURE] *= state.factors[:, None]
    by_way[-1, :, TEMPERATURE] *= state.factors[best]
    index = torch.arange(len(slots))
    values = torch.stack((slots, _homes(slots, counts, state), lengths, counts, room, best, index))
    last = state.token_ids[slots, (lengths - 1).clamp(min=0)].long().clamp(min=0)
    return DraftRows(values, by_way), _place(last, slots, lengths, room > 0)


@kernel(
    do_not_specialize=["num_rows", "num_slots", "token_width"],
    do_not_specialize_on_alignment=["rows_ptr"],
)
def begin_drafts_kernel(
    rows_ptr,  # [3, num_rows] int64
    token_ids_ptr,  # [num_slots, token_width] int32
    lengths_ptr,  # [num_slots] int64
    can_draft_ptr,  # [num_slots + 1] int64
    params_ptr,  # [num_slots, NUM_COLUMNS] float64
    factors_ptr,  # [NUM_WAYS] float64
    bounds_ptr,  # [NUM_BOUNDS] float64
    matches_ptr,  # [NUM_BOUNDS + 1, NUM_WAYS] float64
    values_ptr,  # [7, num_rows] int64, see `DraftRows`
    by_way_ptr,  # [NUM_WAYS + 1, num_rows, NUM_COLUMNS] float64
    place_ptr,  # [5, num_rows] int64, see `DraftPlace`
    num_rows,
    num_slots,
    token_width,
    NUM_BOUNDS: tl.constexpr,
    NUM_WAYS: tl.constexpr,
    BLOCK_WAYS: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows_ptr + row)
    count = tl.load(rows_ptr + 2 * num_rows + row)
    length = tl.load(lengths_ptr + slot)
    room = (count - 1) * tl.load(can_draft_ptr + slot)
    params_ptr += slot * NUM_COLUMNS
    temperature_range = range_of(tl.load(params_ptr + TEMPERATURE), bounds_ptr, NUM_BOUNDS)
    way = tl.arange(0, BLOCK_WAYS)
    matches = tl.load(matches_ptr + temperature_range * NUM_WAYS + way, mask=way < NUM_WAYS, other=-1.0)
    best = tl.argmax(matches, axis=0)

    column = tl.arange(0, BLOCK_COLUMNS)
    is_column = column < NUM_COLUMNS
    params = tl.load(params_ptr + column, mask=is_column, other=0.0)
    for turn in tl.static_range(NUM_WAYS + 1):
        factor = tl.load(factors_ptr + (turn if turn < NUM_WAYS else best))
        of_way = tl.where(column == TEMPERATURE, params * factor, params)
        tl.store(by_way_ptr + (turn * num_rows + row) * NUM_COLUMNS + column, of_way, mask=is_column)

    values_ptr += row
    tl.store(values_ptr, slot)
    tl.store(values_ptr + num_rows, tl.where(count > 0, slot, num_slots))
    tl.store(values_ptr + 2 * num_rows, length)
    tl.store(values_ptr + 3 * num_rows, count)
    tl.store(values_ptr + 4 * num_rows, room)
    tl.store(values_ptr + 5 * num_rows, best)
    tl.store(values_ptr + 6 * num_rows, row)
    last = tl.load(token_ids_ptr + slot * token_width + tl.maximum(length - 1, 0))
    store_place(place_ptr + row, num_rows, last, slot, length, room > 0)


def add_drafts(by_way: Tensor, place: int, rows: DraftRows, state: DraftState, *, are_ways: bool = False) -> DraftPlace:
    """Store the draft tokens of a place, and return the next one.

    by_way [1, D] int64 are the tokens, or [W, D], of which each row uses those of its way. `are_ways`: they stay in
    `state.first`, for `compare_drafts`. Also writes them to the token table, behind the rows' tokens and the draft
    tokens before, 0 where a row has none but its step has room for it.
    """
    if state.is_host:
        return add_drafts_reference(by_way, place, rows, state, are_ways=are_ways)
    assert by_way.is_contiguous()
    num_rows, num_ways, width = rows.values.shape[1], len(state.factors), state.drafts.shape[1]
    following = DraftPlace(torch.empty(5, num_rows, dtype=torch.int64, device=by_way.device))
    add_drafts_kernel[(num_rows,)](
        by_way,
        rows.values,
        state.token_ids,
        state.drafts,
        state.first,
        following.values,
        num_rows,
        place,
        state.token_ids.shape[1],
        WIDTH=width,
        DRAWN_WAYS=len(by_way),
        NUM_WAYS=num_ways if are_ways else 0,
        BLOCK_WAYS=next_power_of_2(num_ways),
        num_warps=1,
    )
    return following


def add_drafts_reference(
    by_way: Tensor, place: int, rows: DraftRows, state: DraftState, *, are_ways: bool = False
) -> DraftPlace:
    slots, homes, lengths, counts, room, best, index = rows.values
    chosen = by_way[0] if len(by_way) == 1 else by_way[best, index]
    if are_ways:
        state.first[homes] = by_way.T.expand(-1, len(state.factors))
    drafted = torch.where(room > place, chosen, NONE)
    state.drafts[homes, place] = drafted
    token_ids, is_written = drafted.clamp(min=0), counts - 1 > place
    state.token_ids[slots[is_written], lengths[is_written] + place] = token_ids[is_written].int()
    return _place(token_ids, slots, lengths + place + 1, room > place + 1)


@kernel(do_not_specialize=["num_rows", "place", "token_width"], do_not_specialize_on_alignment=["by_way_ptr"])
def add_drafts_kernel(
    by_way_ptr,  # [DRAWN_WAYS, num_rows] int64
    values_ptr,  # [7, num_rows] int64, see `DraftRows`
    token_ids_ptr,  # [slots, token_width] int32
    drafts_ptr,  # [slots + 1, WIDTH] int64
    first_ptr,  # [slots + 1, NUM_WAYS] int64
    place_ptr,  # [5, num_rows] int64, see `DraftPlace`
    num_rows,
    place,
    token_width,
    WIDTH: tl.constexpr,
    DRAWN_WAYS: tl.constexpr,
    NUM_WAYS: tl.constexpr,  # 0: they are not stored
    BLOCK_WAYS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    values_ptr += row
    slot = tl.load(values_ptr)
    home = tl.load(values_ptr + num_rows)
    length = tl.load(values_ptr + 2 * num_rows)
    count = tl.load(values_ptr + 3 * num_rows)
    room = tl.load(values_ptr + 4 * num_rows)
    best = tl.load(values_ptr + 5 * num_rows)
    if DRAWN_WAYS == 1:
        best = 0
    chosen = tl.load(by_way_ptr + best * num_rows + row)
    if NUM_WAYS > 0:
        way = tl.arange(0, BLOCK_WAYS)
        by_way = tl.load(by_way_ptr + tl.minimum(way, DRAWN_WAYS - 1) * num_rows + row)
        tl.store(first_ptr + home * NUM_WAYS + way, by_way, mask=way < NUM_WAYS)
    tl.store(drafts_ptr + home * WIDTH + place, tl.where(room > place, chosen, _NONE))
    token = tl.where(room > place, chosen, 0)
    position = length + place
    tl.store(token_ids_ptr + slot * token_width + position, token.to(tl.int32), mask=count - 1 > place)
    store_place(place_ptr + row, num_rows, token, slot, position + 1, room > place + 1)


@triton.jit
def store_place(place_ptr, num_rows, token, slot, position, is_needed):
    """Store a row of `DraftPlace`."""
    tl.store(place_ptr, tl.maximum(token, 0).to(tl.int64))
    tl.store(place_ptr + num_rows, position)
    tl.store(place_ptr + 2 * num_rows, slot)
    tl.store(place_ptr + 3 * num_rows, tl.where(is_needed, position - 1, 0))
    tl.store(place_ptr + 4 * num_rows, is_needed.to(tl.int64))


@triton.jit
def range_of(temperature, bounds_ptr, NUM_BOUNDS: tl.constexpr):
    """The number of bounds up to a temperature, or up to each of a block of them."""
    found = (temperature != temperature).to(tl.int32)
    for bound in tl.static_range(NUM_BOUNDS):
        found += (temperature >= tl.load(bounds_ptr + bound)).to(tl.int32)
    return found


def _homes(slots: Tensor, counts: Tensor, state: DraftState) -> Tensor:
    """The slots that rows of `counts` tokens write."""
    return torch.where(counts > 0, slots, len(state.lengths))


def _place(token_ids: Tensor, slots: Tensor, positions: Tensor, is_needed: Tensor) -> DraftPlace:
    needed = is_needed.long()
    return DraftPlace(torch.stack((token_ids, positions, slots, (positions - 1) * needed, needed)))
