"""Low-rank adapters (Hu et al. 2021) of a batch's tokens on a GPU: y[t] += scale * (x[t] @ A.T) @ B.T, with the A, B
and scale of the token's slot.

Tokens are sorted by slot, and a program computes a tile of tokens of one slot. The grid has tiles for all tokens in
each slot; programs behind the slot's last token end at once. So the launch does not depend on how many tokens have
which adapter. The first kernel (shrink) cuts the sum over the inputs into parts, which the second one (expand) adds in
order: without atomics, so that results are deterministic.

A product has several segments, neighbouring outputs that have an A of their own: q, k and v.
"""

from dataclasses import dataclass

import torch
import triton.language as tl

from proa_engine.kernels.launch import begin, cdiv, kernel

MIN_RANK = 16  # of a tensor core's product
BLOCK_N = 64
FEW_TOKENS = 512
FEW_BLOCK, MANY_BLOCK = 16, 64  # tokens of a tile
MAX_PARTS = 8  # of the sum over the inputs
PART_INPUTS = 512  # inputs of a part, at least


@dataclass(frozen=True, slots=True, eq=False)
class SlotTokens:
    """Which tokens of a batch have which slot."""

    order: torch.Tensor  # [T] int64: tokens, sorted by slot; those without a slot come first
    starts: torch.Tensor  # [slots + 1] int64: where each slot's tokens begin and end in `order`


def sort_tokens(slots: torch.Tensor, num_slots: int) -> SlotTokens:
    """slots [T] int64, -1: none. Does not synchronize with the host."""
    values, order = slots.sort(stable=True)
    bounds = torch.arange(num_slots + 1, device=slots.device)
    return SlotTokens(order, (values < bounds[:, None]).sum(1))


@dataclass(frozen=True, slots=True, eq=False)
class SlotMatrices:
    """The matrices of all slots for one product. Zeros where an adapter has a lower rank, or none for a segment."""

    a: torch.Tensor  # [slots, segments * rank, in_features]
    b: torch.Tensor  # [slots, out_features, rank]
    scales: torch.Tensor  # [slots, segments] float32
    tiles: torch.Tensor  # [tiles, 3] int32: segment, first output, end of the segment's outputs

    @property
    def rank(self) -> int:
        return self.b.shape[2]


def output_tiles(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """`SlotMatrices.tiles` for segments of so many outputs."""
    tiles, start = [], 0
    for segment, size in enumerate(sizes):
        tiles += [(segment, first, start + size) for first in range(start, start + size, BLOCK_N)]
        start += size
    return torch.tensor(tiles, dtype=torch.int32, device=device)


def add_lora(
    y: torch.Tensor, x: torch.Tensor, matrices: SlotMatrices, tokens: SlotTokens, *, batch_invariant: bool = False
) -> None:
    """Add the adapters' outputs to y [T, out_features], of x [T, in_features].

    With `batch_invariant`, a token's sums are the same for any number of tokens.
    """
    num_tokens, num_inputs = x.shape
    num_slots, num_segments = matrices.scales.shape
    rank, num_outputs = matrices.rank, y.shape[1]
    assert x.stride(1) == 1
    assert y.is_contiguous()
    are_few = batch_invariant or num_tokens <= FEW_TOKENS
    block_m = FEW_BLOCK if are_few else MANY_BLOCK
    num_parts = min(MAX_PARTS, cdiv(num_inputs, PART_INPUTS)) if are_few else 1
    hidden = torch.empty((num_parts, num_tokens, num_segments * rank), dtype=torch.float32, device=x.device)
    num_tiles = cdiv(num_tokens, block_m)
    lora_shrink_kernel[(num_tiles, num_slots, num_segments * num_parts)](
        x,
        matrices.a,
        matrices.scales,
        tokens.order,
        tokens.starts,
        hidden,
        num_tokens,
        num_inputs,
        x.stride(0),
        SEGMENTS=num_segments,
        PARTS=num_parts,
        RANK=rank,
        BLOCK_M=block_m,
        BLOCK_K=128 if rank <= 64 else 32,
        num_warps=4,
    )
    lora_expand_kernel[(matrices.tiles.shape[0], num_tiles, num_slots)](
        hidden,
        matrices.b,
        matrices.scales,
        matrices.tiles,
        tokens.order,
        tokens.starts,
        y,
        num_tokens,
        num_outputs,
        SEGMENTS=num_segments,
        PARTS=num_parts,
        RANK=rank,
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        num_warps=4,
    )


def add_lora_reference(y: torch.Tensor, x: torch.Tensor, matrices: SlotMatrices, tokens: SlotTokens) -> None:
    rank, starts = matrices.rank, tokens.starts.tolist()
    for slot in range(len(starts) - 1):
        rows = tokens.order[starts[slot] : starts[slot + 1]]
        hidden = x[rows].float() @ matrices.a[slot].float().t()
        for segment, scale in enumerate(matrices.scales[slot].tolist()):
            tiles = matrices.tiles[matrices.tiles[:, 0] == segment]
            first, end = int(tiles[0, 1]), int(tiles[0, 2])
            part = (hidden[:, segment * rank : (segment + 1) * rank] * scale).to(x.dtype).float()
            total = y[rows, first:end].float() + part @ matrices.b[slot, first:end].float().t()
            y[rows, first:end] = total.to(y.dtype)


@kernel(do_not_specialize=["num_tokens"])
def lora_shrink_kernel(
    x_ptr,  # [num_tokens, num_inputs]
    a_ptr,  # [slots, SEGMENTS * RANK, num_inputs]
    scales_ptr,  # [slots, SEGMENTS]
    order_ptr,  # [num_tokens]
    starts_ptr,  # [slots + 1]
    hidden_ptr,  # [PARTS, num_tokens, SEGMENTS * RANK]
    num_tokens,
    num_inputs,
    stride_x_token,
    SEGMENTS: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    slot = tl.program_id(1)
    segment = tl.program_id(2) // PARTS
    part = tl.program_id(2) % PARTS
    first = tl.load(starts_ptr + slot) + tl.program_id(0) * BLOCK_M
    end = tl.load(starts_ptr + slot + 1)
    if first >= end:
        return
    place = first + tl.arange(0, BLOCK_M)
    mask = place < end
    token = tl.load(order_ptr + place, mask=mask, other=0)
    rank = tl.arange(0, RANK)
    a_row = (slot * SEGMENTS + segment).to(tl.int64) * RANK + rank
    inner = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_M, RANK], tl.float32)
    for start in range(part * BLOCK_K, num_inputs, PARTS * BLOCK_K):
        index = start + inner
        index_mask = index < num_inputs
        # [BLOCK_M, BLOCK_K]
        x = tl.load(
            x_ptr + token[:, None] * stride_x_token + index[None, :],
            mask=mask[:, None] & index_mask[None, :],
            other=0.0,
        )
        # [BLOCK_K, RANK]
        a = tl.load(a_ptr + a_row[None, :] * num_inputs + index[:, None], mask=index_mask[:, None], other=0.0)
        total = tl.dot(x, a, total, input_precision="ieee")
    total *= tl.load(scales_ptr + slot * SEGMENTS + segment)
    hidden_row = part.to(tl.int64) * num_tokens + token
    tl.store(
        hidden_ptr + hidden_row[:, None] * (SEGMENTS * RANK) + segment * RANK + rank[None, :], total, mask=mask[:, None]
    )


@kernel(do_not_specialize=["num_tokens"])
def lora_expand_kernel(
    hidden_ptr,  # [PARTS, num_tokens, SEGMENTS * RANK]
    b_ptr,  # [slots, num_outputs, RANK]
    scales_ptr,  # [slots, SEGMENTS]
    tiles_ptr,  # [tiles, 3]
    order_ptr,  # [num_tokens]
    starts_ptr,  # [slots + 1]
    y_ptr,  # [num_tokens, num_outputs]
    num_tokens,
    num_outputs,
    SEGMENTS: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    tile = tl.program_id(0)
    slot = tl.program_id(2)
    first = tl.load(starts_ptr + slot) + tl.program_id(1) * BLOCK_M
    end = tl.load(starts_ptr + slot + 1)
    if first >= end:
        return
    segment = tl.load(tiles_ptr + tile * 3)
    if tl.load(scales_ptr + slot * SEGMENTS + segment) == 0.0:  # the adapter has nothing for this segment
        return
    place = first + tl.arange(0, BLOCK_M)
    mask = place < end
    token = tl.load(order_ptr + place, mask=mask, other=0)
    rank = tl.arange(0, RANK)
    n = tl.load(tiles_ptr + tile * 3 + 1) + tl.arange(0, BLOCK_N)
    n_mask = n < tl.load(tiles_ptr + tile * 3 + 2)
    # [RANK, BLOCK_N]
    b_row = slot.to(tl.int64) * num_outputs + n
    b = tl.load(b_ptr + b_row[None, :] * RANK + rank[:, None], mask=n_mask[None, :], other=0.0)
    # [BLOCK_M, RANK]
    hidden = tl.zeros([BLOCK_M, RANK], tl.float32)
    for part in tl.static_range(PARTS):
        row = part * num_tokens + token
        hidden += tl.load(
            hidden_ptr + row[:, None] * (SEGMENTS * RANK) + segment * RANK + rank[None, :],
            mask=mask[:, None],
            other=0.0,
        )
    y_place = y_ptr + token[:, None] * num_outputs + n[None, :]
    y_mask = mask[:, None] & n_mask[None, :]
    y = tl.load(y_place, mask=y_mask, other=0.0).to(tl.float32)
    y = tl.dot(hidden.to(b.dtype), b, y, input_precision="ieee")
    tl.store(y_place, y, mask=y_mask)
