"""Inputs of a step of decodes, gathered on the device from the rows' slots and ends by one kernel.

Grid: (rows, parts of a block table, block tables).
"""

from dataclasses import dataclass

import torch
import triton.language as tl

from proa_engine.kernels.launch import INTERPRETED, cdiv, kernel, next_power_of_2

BLOCK = 1024


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The inputs of R rows of W tokens each. A row's own tokens come last; those before them are padding: token 0 at
    position 0, written to no slot. A padding row also has an empty context."""

    input_ids: torch.Tensor  # [R * W] int64
    positions: torch.Tensor  # [R * W] int64: for the rotation
    slot_mappings: torch.Tensor  # [tables, R * W] int64: -1 for padding
    seq_lens: torch.Tensor  # [R] int32: 0 for padding
    block_tables: torch.Tensor  # [tables, R, max_blocks] int32: valid up to the row's end


def decode_inputs(
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    width: int = 1,
    position_deltas: torch.Tensor | None = None,
) -> DecodeInputs:
    """rows [3, R] int64 are slots, ends and numbers of tokens: a row computes that many tokens, at most `width`, before
    its end. A padding row has no tokens and the end 0. token_ids [slots, length] int32 and block_tables
    [tables, slots, max_blocks] int32 are by slot. A token's position is its place among its request's tokens, plus
    position_deltas [slots] int64 if there are any."""
    if rows.is_cpu and not INTERPRETED:
        return decode_inputs_reference(rows, token_ids, block_tables, block_size, width, position_deltas)
    num_rows, (num_tables, num_slots, max_blocks) = rows.shape[1], block_tables.shape
    assert rows.is_contiguous()
    assert token_ids.is_contiguous()
    assert block_tables.is_contiguous()
    long = torch.empty(2 + num_tables, num_rows * width, dtype=torch.int64, device=rows.device)
    short = torch.int32
    inputs = DecodeInputs(
        input_ids=long[0],
        positions=long[1],
        slot_mappings=long[2:],
        seq_lens=torch.empty(num_rows, dtype=short, device=rows.device),
        block_tables=torch.empty(num_tables, num_rows, max_blocks, dtype=short, device=rows.device),
    )
    decode_inputs_kernel[(num_rows, cdiv(max_blocks, BLOCK), num_tables)](
        rows,
        token_ids,
        block_tables,
        position_deltas,
        inputs.input_ids,
        inputs.positions,
        inputs.slot_mappings,
        inputs.seq_lens,
        inputs.block_tables,
        num_rows,
        num_slots,
        token_ids.shape[1],
        max_blocks,
        WIDTH=width,
        BLOCK_WIDTH=next_power_of_2(width),
        BLOCK_SIZE=block_size,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return inputs


def decode_inputs_reference(
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    width: int = 1,
    position_deltas: torch.Tensor | None = None,
) -> DecodeInputs:
    slots, ends, num_tokens = (column[:, None] for column in rows)
    back = torch.arange(width, 0, -1)
    is_padding = back > num_tokens  # [R, W]
    place = (ends - back).masked_fill(is_padding, 0)
    blocks = block_tables[:, slots, place // block_size].long()
    positions = place if position_deltas is None else (place + position_deltas[slots]).masked_fill(is_padding, 0)
    return DecodeInputs(
        input_ids=token_ids[slots, place].long().masked_fill(is_padding, 0).view(-1),
        positions=positions.view(-1),
        slot_mappings=(blocks * block_size + place % block_size).masked_fill(is_padding, -1).flatten(1),
        seq_lens=rows[1].int(),
        block_tables=block_tables.index_select(1, rows[0]),
    )


@kernel(
    do_not_specialize=["num_rows", "num_slots", "token_width", "max_blocks"],
    do_not_specialize_on_alignment=["input_ids_ptr", "positions_ptr", "slot_mappings_ptr"],
)
def decode_inputs_kernel(
    rows_ptr,  # [3, num_rows] int64
    token_ids_ptr,  # [slots, token_width] int32
    block_tables_ptr,  # [tables, slots, max_blocks] int32
    position_deltas_ptr,  # [slots] int64, or None
    input_ids_ptr,  # [num_rows, WIDTH] int64
    positions_ptr,  # [num_rows, WIDTH] int64
    slot_mappings_ptr,  # [tables, num_rows, WIDTH] int64
    seq_lens_ptr,  # [num_rows] int32
    out_tables_ptr,  # [tables, num_rows, max_blocks] int32
    num_rows,
    num_slots,
    token_width,
    max_blocks,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    table = tl.program_id(2).to(tl.int64)
    slot = tl.load(rows_ptr + row)
    end = tl.load(rows_ptr + num_rows + row)
    column = part * BLOCK + tl.arange(0, BLOCK)
    is_used = (column < max_blocks) & (column * BLOCK_SIZE < end)
    # [BLOCK]
    blocks_ptr = block_tables_ptr + (table * num_slots + slot) * max_blocks
    blocks = tl.load(blocks_ptr + column, mask=is_used, other=0)
    tl.store(out_tables_ptr + (table * num_rows + row) * max_blocks + column, blocks, mask=is_used)
    if part == 0:
        num_tokens = tl.load(rows_ptr + 2 * num_rows + row)
        index = tl.arange(0, BLOCK_WIDTH)
        is_token = (index >= WIDTH - num_tokens) & (index < WIDTH)
        place = tl.where(is_token, end - WIDTH + index, 0)
        # [BLOCK_WIDTH]
        block = tl.load(blocks_ptr + place // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
        cache_slot = tl.where(is_token, block * BLOCK_SIZE + place % BLOCK_SIZE, -1)
        out = row * WIDTH + index
        tl.store(slot_mappings_ptr + table * num_rows * WIDTH + out, cache_slot, mask=index < WIDTH)
        if table == 0:
            token_id = tl.load(token_ids_ptr + slot * token_width + place, mask=is_token, other=0)
            tl.store(input_ids_ptr + out, token_id.to(tl.int64), mask=index < WIDTH)
            position = place
            if position_deltas_ptr is not None:
                position += tl.where(is_token, tl.load(position_deltas_ptr + slot), 0)
            tl.store(positions_ptr + out, position, mask=index < WIDTH)
            tl.store(seq_lens_ptr + row, end.to(tl.int32))
