"""Inputs of a step of decodes, gathered on the device from the rows' slots and ends by one kernel.

Grid: (rows, parts of the block table).
"""

from dataclasses import dataclass

import torch
import triton.language as tl

from proa_engine.kernels.launch import kernel
from proa_engine.kernels.sizes import cdiv, next_power_of_2

BLOCK = 1024


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The inputs of R rows of W tokens each. A row's own tokens come last; those before them are padding: token 0 at
    position 0, written to no slot. A padding row also has an empty context."""

    input_ids: torch.Tensor  # [R * W] int64
    positions: torch.Tensor  # [R * W] int64
    slot_mapping: torch.Tensor  # [R * W] int64: -1 for padding
    seq_lens: torch.Tensor  # [R] int32: 0 for padding
    block_table: torch.Tensor  # [R, max_blocks] int32: valid up to the row's end


def decode_inputs(
    rows: torch.Tensor, token_ids: torch.Tensor, block_table: torch.Tensor, block_size: int, width: int = 1
) -> DecodeInputs:
    """rows [3, R] int64 are slots, ends and numbers of tokens: a row computes that many tokens, at most `width`, before
    its end. A padding row has no tokens and the end 0. token_ids [slots, length] int32 and block_table
    [slots, max_blocks] int32 are by slot."""
    if rows.is_cpu:
        return decode_inputs_reference(rows, token_ids, block_table, block_size, width)
    return _decode_inputs_triton(rows, token_ids, block_table, block_size, width)


def decode_inputs_reference(
    rows: torch.Tensor, token_ids: torch.Tensor, block_table: torch.Tensor, block_size: int, width: int = 1
) -> DecodeInputs:
    slots, ends, num_tokens = (column[:, None] for column in rows)
    back = torch.arange(width, 0, -1)
    is_padding = back > num_tokens  # [R, W]
    place = (ends - back).masked_fill(is_padding, 0)
    blocks = block_table[slots, place // block_size].long()
    return DecodeInputs(
        input_ids=token_ids[slots, place].long().masked_fill(is_padding, 0).view(-1),
        positions=place.view(-1),
        slot_mapping=(blocks * block_size + place % block_size).masked_fill(is_padding, -1).view(-1),
        seq_lens=rows[1].int(),
        block_table=block_table.index_select(0, rows[0]),
    )


def _decode_inputs_triton(
    rows: torch.Tensor, token_ids: torch.Tensor, block_table: torch.Tensor, block_size: int, width: int = 1
) -> DecodeInputs:
    num_rows, max_blocks = rows.shape[1], block_table.shape[1]
    assert rows.is_contiguous()
    assert token_ids.is_contiguous()
    assert block_table.is_contiguous()
    long, short = torch.empty(3, num_rows * width, dtype=torch.int64, device=rows.device), torch.int32
    inputs = DecodeInputs(
        input_ids=long[0],
        positions=long[1],
        slot_mapping=long[2],
        seq_lens=torch.empty(num_rows, dtype=short, device=rows.device),
        block_table=torch.empty(num_rows, max_blocks, dtype=short, device=rows.device),
    )
    decode_inputs_kernel[(num_rows, cdiv(max_blocks, BLOCK))](
        rows,
        token_ids,
        block_table,
        inputs.input_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.seq_lens,
        inputs.block_table,
        num_rows,
        token_ids.shape[1],
        max_blocks,
        WIDTH=width,
        BLOCK_WIDTH=next_power_of_2(width),
        BLOCK_SIZE=block_size,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return inputs


@kernel(
    do_not_specialize=["num_rows", "token_width", "max_blocks"],
    do_not_specialize_on_alignment=["input_ids_ptr", "positions_ptr", "slot_mapping_ptr"],
)
def decode_inputs_kernel(
    rows_ptr,  # [3, num_rows] int64
    token_ids_ptr,  # [slots, token_width] int32
    block_table_ptr,  # [slots, max_blocks] int32
    input_ids_ptr,  # [num_rows, WIDTH] int64
    positions_ptr,  # [num_rows, WIDTH] int64
    slot_mapping_ptr,  # [num_rows, WIDTH] int64
    seq_lens_ptr,  # [num_rows] int32
    out_table_ptr,  # [num_rows, max_blocks] int32
    num_rows,
    token_width,
    max_blocks,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(rows_ptr + row)
    end = tl.load(rows_ptr + num_rows + row)
    column = part * BLOCK + tl.arange(0, BLOCK)
    is_used = (column < max_blocks) & (column * BLOCK_SIZE < end)
    # [BLOCK]
    blocks = tl.load(block_table_ptr + slot * max_blocks + column, mask=is_used, other=0)
    tl.store(out_table_ptr + row * max_blocks + column, blocks, mask=is_used)
    if part == 0:
        num_tokens = tl.load(rows_ptr + 2 * num_rows + row)
        index = tl.arange(0, BLOCK_WIDTH)
        is_token = (index >= WIDTH - num_tokens) & (index < WIDTH)
        place = tl.where(is_token, end - WIDTH + index, 0)
        # [BLOCK_WIDTH]
        token_id = tl.load(token_ids_ptr + slot * token_width + place, mask=is_token, other=0)
        block = tl.load(block_table_ptr + slot * max_blocks + place // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
        out = row * WIDTH + index
        tl.store(input_ids_ptr + out, token_id.to(tl.int64), mask=index < WIDTH)
        tl.store(positions_ptr + out, place, mask=index < WIDTH)
        cache_slot = tl.where(is_token, block * BLOCK_SIZE + place % BLOCK_SIZE, -1)
        tl.store(slot_mapping_ptr + out, cache_slot, mask=index < WIDTH)
        tl.store(seq_lens_ptr + row, end.to(tl.int32))
