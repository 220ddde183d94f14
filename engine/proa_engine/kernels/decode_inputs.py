"""Inputs of a step of decodes, gathered on the device from the rows' slots and positions by one kernel.

Grid: (rows, parts of the block table).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 1024


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The inputs of R rows. A padding row is token 0 at position 0 with an empty context and is written to no slot."""

    input_ids: torch.Tensor  # [R] int64
    positions: torch.Tensor  # [R] int64
    seq_lens: torch.Tensor  # [R] int32: 0 for padding
    slot_mapping: torch.Tensor  # [R] int64: -1 for padding
    block_table: torch.Tensor  # [R, max_blocks] int32: valid up to the row's own block


def decode_inputs(
    rows: torch.Tensor, token_ids: torch.Tensor, block_table: torch.Tensor, block_size: int
) -> DecodeInputs:
    """rows [2, R] int64 are slots, then positions, -1 for padding; token_ids [slots, length] int32 and block_table
    [slots, max_blocks] int32 are by slot."""
    if rows.is_cpu:
        return decode_inputs_reference(rows, token_ids, block_table, block_size)
    return _decode_inputs_triton(rows, token_ids, block_table, block_size)


def decode_inputs_reference(
    rows: torch.Tensor, token_ids: torch.Tensor, block_table: torch.Tensor, block_size: int
) -> DecodeInputs:
    slots, positions = rows
    is_padding = positions < 0
    place = positions.clamp(min=0)
    blocks = block_table[slots, place // block_size].long()
    return DecodeInputs(
        input_ids=token_ids[slots, place].long().masked_fill(is_padding, 0),
        positions=place,
        seq_lens=(positions + 1).int(),
        slot_mapping=(blocks * block_size + place % block_size).masked_fill(is_padding, -1),
        block_table=block_table.index_select(0, slots),
    )


def _decode_inputs_triton(
    rows: torch.Tensor, token_ids: torch.Tensor, block_table: torch.Tensor, block_size: int
) -> DecodeInputs:
    num_rows, max_blocks = rows.shape[1], block_table.shape[1]
    assert rows.is_contiguous()
    assert token_ids.is_contiguous()
    assert block_table.is_contiguous()
    long, short = torch.empty(3, num_rows, dtype=torch.int64, device=rows.device), torch.int32
    inputs = DecodeInputs(
        input_ids=long[0],
        positions=long[1],
        seq_lens=torch.empty(num_rows, dtype=short, device=rows.device),
        slot_mapping=long[2],
        block_table=torch.empty(num_rows, max_blocks, dtype=short, device=rows.device),
    )
    decode_inputs_kernel[(num_rows, triton.cdiv(max_blocks, BLOCK))](
        rows,
        token_ids,
        block_table,
        inputs.input_ids,
        inputs.positions,
        inputs.seq_lens,
        inputs.slot_mapping,
        inputs.block_table,
        num_rows,
        token_ids.shape[1],
        max_blocks,
        BLOCK_SIZE=block_size,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return inputs


@triton.jit(
    do_not_specialize=["num_rows", "token_width", "max_blocks"],
    do_not_specialize_on_alignment=["input_ids_ptr", "positions_ptr", "slot_mapping_ptr"],
)
def decode_inputs_kernel(
    rows_ptr,  # [2, num_rows] int64
    token_ids_ptr,  # [slots, token_width] int32
    block_table_ptr,  # [slots, max_blocks] int32
    input_ids_ptr,  # [num_rows] int64
    positions_ptr,  # [num_rows] int64
    seq_lens_ptr,  # [num_rows] int32
    slot_mapping_ptr,  # [num_rows] int64
    out_table_ptr,  # [num_rows, max_blocks] int32
    num_rows,
    token_width,
    max_blocks,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(rows_ptr + row)
    position = tl.load(rows_ptr + num_rows + row)
    column = part * BLOCK + tl.arange(0, BLOCK)
    is_used = (column < max_blocks) & (column * BLOCK_SIZE <= position)
    # [BLOCK]
    blocks = tl.load(block_table_ptr + slot * max_blocks + column, mask=is_used, other=0)
    tl.store(out_table_ptr + row * max_blocks + column, blocks, mask=is_used)
    if part == 0:
        is_row = position >= 0
        place = tl.maximum(position, 0)
        token_id = tl.load(token_ids_ptr + slot * token_width + place, mask=is_row, other=0)
        block = tl.load(block_table_ptr + slot * max_blocks + place // BLOCK_SIZE, mask=is_row, other=0).to(tl.int64)
        tl.store(input_ids_ptr + row, token_id.to(tl.int64))
        tl.store(positions_ptr + row, place)
        tl.store(seq_lens_ptr + row, (position + 1).to(tl.int32))
        tl.store(slot_mapping_ptr + row, tl.where(is_row, block * BLOCK_SIZE + place % BLOCK_SIZE, -1))
