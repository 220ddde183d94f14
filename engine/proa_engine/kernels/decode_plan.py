"""Split-KV plan of a step's decodes: computed once a step, on the device, used by every layer.

Long contexts are split, so that the whole GPU reads them. Each part ("item") is one program for each KV head in
`decode_attention`. The split length is chosen so that there are about as many items as the GPU can run at once, however
the lengths are distributed. The number of items has an upper bound that is known without the lengths, so the host needs
none of them. One program.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from proa_engine.kernels.launch import cdiv, kernel, num_multiprocessors

PROGRAMS_PER_MULTIPROCESSOR = 2
SPLIT_MULTIPLE = 128  # tokens: a shorter split costs more to merge than it saves
BLOCK = 256


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Rows are the step's leading requests, `width` query tokens each. `items` of them, each row's side by side."""

    num_rows: int
    width: int
    window: int | None
    slot_mapping: torch.Tensor | None  # [num_rows * width] int64; -1: padding. None: none but before a row's beginning
    item_row: torch.Tensor  # [max_items] int32; -1: no item
    first_item: torch.Tensor  # [num_rows + 1] int32
    split_length: torch.Tensor  # [1] int32: tokens of an item; the last of a row may have fewer
    arrived: torch.Tensor  # [num_rows * kv_heads * width] int32: finished items of a row; zero between layers

    @property
    def reach(self) -> int:
        """Tokens before a row's end that its queries attend to; 0: all."""
        return 0 if self.window is None else self.window + self.width - 1


def plan_decodes(
    seq_lens: torch.Tensor,
    num_rows: int,
    num_kv_heads: int,
    window: int | None,
    width: int = 1,
    slot_mapping: torch.Tensor | None = None,
) -> DecodePlan:
    """Plan the first `num_rows` of seq_lens [requests] int32, where 0 is padding, with `width` query tokens each.

    `slot_mapping` [num_rows * width] int64 is -1 for query tokens that are padding, whose keys may not be there.
    """
    device = seq_lens.device
    spare_items = cdiv(PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(device), num_kv_heads)
    max_items = num_rows + spare_items
    plan = DecodePlan(
        num_rows=num_rows,
        width=width,
        window=window,
        slot_mapping=None if window is None or width == 1 else slot_mapping,
        item_row=torch.empty(max_items, dtype=torch.int32, device=device),
        first_item=torch.empty(num_rows + 1, dtype=torch.int32, device=device),
        split_length=torch.empty(1, dtype=torch.int32, device=device),
        arrived=torch.empty(num_rows * num_kv_heads * width, dtype=torch.int32, device=device),
    )
    if not num_rows:
        return plan
    decode_plan_kernel[(1,)](
        seq_lens,
        plan.item_row,
        plan.first_item,
        plan.split_length,
        plan.arrived,
        num_rows,
        max_items,
        spare_items,
        plan.arrived.numel(),
        REACH=plan.reach,
        MULTIPLE=SPLIT_MULTIPLE,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return plan


@triton.jit
def first_token(seq_len, REACH: tl.constexpr, MULTIPLE: tl.constexpr):
    """Return the position of the first token of a decode's first item."""
    if REACH == 0:
        return seq_len * 0
    return tl.maximum(seq_len - REACH, 0) // MULTIPLE * MULTIPLE


@kernel(do_not_specialize=["num_rows", "max_items", "spare_items", "num_arrived"])
def decode_plan_kernel(
    seq_lens_ptr,  # [num_rows]
    item_row_ptr,  # [max_items]
    first_item_ptr,  # [num_rows + 1]
    split_length_ptr,  # [1]
    arrived_ptr,  # [num_arrived]
    num_rows,
    max_items,
    spare_items,
    num_arrived,
    REACH: tl.constexpr,
    MULTIPLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    num_tokens = 0
    for base in range(0, num_rows, BLOCK):
        seq_len = tl.load(seq_lens_ptr + base + lane, mask=base + lane < num_rows, other=0)
        num_tokens += tl.sum(seq_len - first_token(seq_len, REACH, MULTIPLE))
    length = tl.maximum(tl.cdiv(tl.cdiv(num_tokens, spare_items), MULTIPLE) * MULTIPLE, MULTIPLE)
    tl.store(split_length_ptr, length)

    num_items = 0
    for base in range(0, num_rows, BLOCK):
        row = base + lane
        is_row = row < num_rows
        seq_len = tl.load(seq_lens_ptr + row, mask=is_row, other=0)
        # A padding row also has an item, which writes zeros.
        num_splits = tl.maximum(tl.cdiv(seq_len - first_token(seq_len, REACH, MULTIPLE), length), 1)
        num_splits = tl.where(is_row, num_splits, 0)
        last = num_items + tl.cumsum(num_splits, axis=0)
        tl.store(first_item_ptr + row, last - num_splits, mask=is_row)
        for split in range(0, tl.max(num_splits)):
            tl.store(item_row_ptr + last - num_splits + split, row, mask=split < num_splits)
        num_items += tl.sum(num_splits)
    tl.store(first_item_ptr + num_rows, num_items)
    for base in range(0, max_items, BLOCK):
        item = base + lane
        tl.store(item_row_ptr + item, item * 0 - 1, mask=(item >= num_items) & (item < max_items))
    for base in range(0, num_arrived, BLOCK):
        tl.store(arrived_ptr + base + lane, lane * 0, mask=base + lane < num_arrived)
