"""Split-KV plan of a step's decodes: computed once a step, on the device, used by every layer.

Long contexts are split, so that the whole GPU reads them. Each part ("item") is one program for each KV head in
`decode_attention`. Parts are about so long that there are as many items as the GPU can run at once, however the lengths
are distributed, and the parts of a row are alike. The number of items has an upper bound that is known without the
lengths, so the host needs none of them.

Items are in the order of their lengths, longest first: they start in this order, and the last ones to start are the
shortest (longest processing time first; Graham 1969). Each program of the kernel places the items of `BLOCK_ROWS` rows:
a row's first item is the number of items of the rows before it, which are those with longer parts.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from proa_engine.kernels.launch import cdiv, kernel, num_multiprocessors

PROGRAMS_PER_MULTIPROCESSOR = 2
SPLIT_MULTIPLE = 64  # tokens: a tile of `decode_attention`; longer parts leave one request's context to few programs
BLOCK_ROWS = 32
BLOCK = 256


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Rows are the step's leading requests, `width` query tokens each. A row's items lie side by side."""

    num_rows: int
    width: int
    window: int | None
    causal: bool  # False: all query tokens of a row attend to all of its tokens
    slot_mapping: torch.Tensor | None  # [num_rows * width] int64; -1: padding. None: none but before a row's beginning
    # [6, max_items] int32: row, first token, end of the tokens, length and first item of the row, and its number of
    # items. Behind the last item -1 and the number of all items.
    items: torch.Tensor
    arrived: torch.Tensor  # [num_rows * kv_heads * width] int32: finished items of a row; zero between layers

    @property
    def max_items(self) -> int:
        return self.items.shape[1]


def plan_decodes(
    seq_lens: torch.Tensor,
    num_rows: int,
    num_kv_heads: int,
    window: int | None,
    width: int = 1,
    slot_mapping: torch.Tensor | None = None,
    *,
    causal: bool = True,
) -> DecodePlan:
    """Plan the first `num_rows` of seq_lens [requests] int32, where 0 is padding, with `width` query tokens each. The
    rows' tokens together must be fewer than 2**31.

    `slot_mapping` [num_rows * width] int64 is -1 for query tokens that are padding, whose keys may not be there.
    """
    device = seq_lens.device
    spare_items = cdiv(PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(device), num_kv_heads)
    max_items = num_rows + spare_items
    plan = DecodePlan(
        num_rows=num_rows,
        width=width,
        window=window,
        causal=causal,
        slot_mapping=None if window is None or width == 1 else slot_mapping,
        items=torch.empty(6, max_items, dtype=torch.int32, device=device),
        arrived=torch.empty(num_rows * num_kv_heads * width, dtype=torch.int32, device=device),
    )
    if not num_rows:
        return plan
    decode_plan_kernel[(cdiv(num_rows, BLOCK_ROWS),)](
        seq_lens,
        plan.items,
        plan.arrived,
        num_rows,
        max_items,
        spare_items,
        plan.arrived.numel(),
        REACH=0 if window is None else window + width - 1,
        MULTIPLE=SPLIT_MULTIPLE,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return plan


@triton.jit
def first_token(seq_len, REACH: tl.constexpr, MULTIPLE: tl.constexpr):
    """Return the position of the first token of a decode's first item."""
    if REACH == 0:  # the queries attend to all tokens before them
        return seq_len * 0
    return tl.maximum(seq_len - REACH, 0) // MULTIPLE * MULTIPLE


@triton.jit
def split(num_tokens, longest, MULTIPLE: tl.constexpr):
    """Return the length of a row's parts, the last of which may be shorter, and their number.

    A padding row also has a part, which writes zeros.
    """
    num_parts = tl.maximum(tl.cdiv(num_tokens, longest), 1)
    length = tl.cdiv(tl.cdiv(num_tokens, num_parts), MULTIPLE) * MULTIPLE
    return length, tl.maximum(tl.cdiv(num_tokens, tl.maximum(length, 1)), 1)


@kernel(do_not_specialize=["num_rows", "max_items", "spare_items", "num_arrived"])
def decode_plan_kernel(
    seq_lens_ptr,  # [num_rows]
    item_ptr,  # [6, max_items]
    arrived_ptr,  # [num_arrived]
    num_rows,
    max_items,
    spare_items,
    num_arrived,
    REACH: tl.constexpr,  # tokens before a row's end that its queries attend to; 0: all
    MULTIPLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    num_tokens = 0
    for base in range(0, num_rows, BLOCK):
        seq_len = tl.load(seq_lens_ptr + base + lane, mask=base + lane < num_rows, other=0)
        num_tokens += tl.sum(seq_len - first_token(seq_len, REACH, MULTIPLE))
    longest = tl.maximum(tl.cdiv(tl.cdiv(num_tokens, spare_items), MULTIPLE) * MULTIPLE, MULTIPLE)

    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = row < num_rows
    seq_len = tl.load(seq_lens_ptr + row, mask=is_row, other=0)
    first = first_token(seq_len, REACH, MULTIPLE)
    length, num_parts = split(seq_len - first, longest, MULTIPLE)
    num_parts = tl.where(is_row, num_parts, 0)
    first_item = row * 0
    num_items = 0
    for base in range(0, num_rows, BLOCK):
        other = base + lane
        is_other = other < num_rows
        other_len = tl.load(seq_lens_ptr + other, mask=is_other, other=0)
        other_len -= first_token(other_len, REACH, MULTIPLE)
        other_length, other_parts = split(other_len, longest, MULTIPLE)
        other_parts = tl.where(is_other, other_parts, 0)
        is_before = other_length[None, :] > length[:, None]
        is_before |= (other_length[None, :] == length[:, None]) & (other[None, :] < row[:, None])
        first_item += tl.sum(tl.where(is_before, other_parts[None, :], 0), axis=1)
        num_items += tl.sum(other_parts)

    for part in range(0, tl.max(num_parts)):
        place = item_ptr + first_item + part
        is_part = part < num_parts
        tl.store(place, row, mask=is_part)
        tl.store(place + max_items, first + part * length, mask=is_part)
        tl.store(place + 2 * max_items, tl.minimum(first + (part + 1) * length, seq_len), mask=is_part)
        tl.store(place + 3 * max_items, seq_len, mask=is_part)
        tl.store(place + 4 * max_items, first_item, mask=is_part)
        tl.store(place + 5 * max_items, num_parts, mask=is_part)
    start = tl.program_id(0) * BLOCK
    for base in range(start, max_items, tl.num_programs(0) * BLOCK):
        item = base + lane
        is_behind = (item >= num_items) & (item < max_items)
        tl.store(item_ptr + item, item * 0 - 1, mask=is_behind)
        tl.store(item_ptr + max_items + item, item * 0 + num_items, mask=is_behind)
    for base in range(start, num_arrived, tl.num_programs(0) * BLOCK):
        tl.store(arrived_ptr + base + lane, lane * 0, mask=base + lane < num_arrived)
