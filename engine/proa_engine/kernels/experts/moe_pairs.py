"""(Token, expert) pairs: sort them by expert, and sum each token's outputs.

A rank may hold a range of the experts. The pairs of other experts are in no block, and count as zero in its sums.

`align_pairs` groups pairs by expert into blocks of rows, each of one expert: a counting sort with one program for each
expert and each segment of the pairs. It computes from the numbers of all experts' pairs the expert's first block, and
from that of its own in earlier segments where the segment's begin there, and writes these, in order. With up to
`COUNTED_SEGMENTS` segments each program counts all pairs itself; with more, another launch does so before, with one
program for each expert and segment. The host knows only an upper bound of the number of blocks.

`combine_pairs` sums the experts' outputs of each token, in the order of choice. One program for each token and block of
outputs.
"""

from dataclasses import dataclass

import torch
import triton.language as tl

from proa_engine.kernels.launch import INTERPRETED, begin, cdiv, kernel, next_power_of_2

CHUNK = 1024  # pairs processed at once
# More segments shorten each program, but each reads the counts of all.
MAX_SEGMENTS = 16
# To count a segment takes a thread 229 instructions with 128 experts, less time than the launch that counts all.
COUNTED_SEGMENTS = 2

BLOCK = 1024  # outputs of a program of `combine_pairs`


@dataclass(frozen=True, slots=True)
class ExpertRange:
    """The experts that a rank holds: `size` of them from `first` on, of a layer's `total`."""

    first: int
    size: int
    total: int

    @classmethod
    def all(cls, total: int) -> "ExpertRange":
        return cls(0, total, total)

    @property
    def is_all(self) -> bool:
        return self.size == self.total

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.size)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertBlocks:
    """Pair p is choice p % k of token p // k."""

    pairs: torch.Tensor  # [max_blocks * block_size] int32, grouped by expert, ascending; the value num_pairs: padding
    experts: torch.Tensor  # [max_blocks] int32: the expert of each block, counted from the first that is held
    num_blocks: torch.Tensor  # [1] int32: blocks in use; what lies behind them has no meaning
    max_blocks: int
    block_size: int


def align_pairs(experts: torch.Tensor, held: ExpertRange, block_size: int) -> ExpertBlocks:
    """experts [T, k] int32"""
    num_pairs, num_experts = experts.numel(), held.size
    segment_size = CHUNK * cdiv(num_pairs, CHUNK * MAX_SEGMENTS)
    grid = (num_experts, cdiv(num_pairs, segment_size))
    max_blocks = _max_blocks(num_pairs, num_experts, block_size)
    empty = experts.new_empty
    counts = empty((grid[1], num_experts))
    blocks = ExpertBlocks(
        pairs=empty(max_blocks * block_size),
        experts=empty(max_blocks),
        num_blocks=empty(1),
        max_blocks=max_blocks,
        block_size=block_size,
    )
    if grid[1] > COUNTED_SEGMENTS:
        count_pairs_kernel[grid](experts, counts, num_pairs, segment_size, held.first, CHUNK=CHUNK)
    align_pairs_kernel[grid](
        experts,
        counts,
        blocks.pairs,
        blocks.experts,
        blocks.num_blocks,
        num_pairs,
        segment_size,
        held.first,
        BLOCK_SIZE=block_size,
        BLOCK_EXPERTS=next_power_of_2(num_experts),
        MAX_SEGMENTS=MAX_SEGMENTS,
        COUNTED_SEGMENTS=COUNTED_SEGMENTS,
        CHUNK=CHUNK,
        num_warps=8,
    )
    return blocks


def align_pairs_reference(experts: torch.Tensor, held: ExpertRange, block_size: int) -> ExpertBlocks:
    """Compute `align_pairs` on any device; blocks that are not in use are padding of the first expert."""
    num_pairs = experts.numel()
    [own_pairs] = is_held(experts, held).flatten().nonzero(as_tuple=True)
    chosen = experts.flatten()[own_pairs].long() - held.first
    counts = chosen.bincount(minlength=held.size)
    blocks_of = (counts + block_size - 1) // block_size
    sorted_experts, order = chosen.sort(stable=True)
    rank = torch.arange(len(chosen), device=chosen.device) - (counts.cumsum(0) - counts)[sorted_experts]
    position = (blocks_of.cumsum(0) - blocks_of)[sorted_experts] * block_size + rank
    max_blocks = _max_blocks(num_pairs, held.size, block_size)
    blocks = ExpertBlocks(
        pairs=experts.new_full((max_blocks * block_size,), num_pairs),
        experts=experts.new_zeros(max_blocks),
        num_blocks=blocks_of.sum(0, keepdim=True).to(torch.int32),
        max_blocks=max_blocks,
        block_size=block_size,
    )
    blocks.pairs[position] = own_pairs[order].to(torch.int32)
    blocks.experts[position // block_size] = sorted_experts.to(torch.int32)
    return blocks


def is_held(experts: torch.Tensor, held: ExpertRange) -> torch.Tensor:
    return (experts >= held.first) & (experts < held.first + held.size)


def _max_blocks(num_pairs: int, num_experts: int, block_size: int) -> int:
    """Return an upper bound of the blocks in use: each expert with pairs may leave one block partly empty."""
    return min(num_pairs, num_pairs // block_size + num_experts)


# Ranks differ in `first_expert`, but launch the same variants.
@kernel(do_not_specialize=["num_pairs", "segment_size", "first_expert"])
def count_pairs_kernel(
    experts_ptr,  # [num_pairs]
    counts_ptr,  # [segments, held experts]
    num_pairs,
    segment_size,
    first_expert,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    expert = tl.program_id(0)
    segment = tl.program_id(1)
    counts = tl.zeros([CHUNK], tl.int32)
    for start in range(segment * segment_size, tl.minimum((segment + 1) * segment_size, num_pairs), CHUNK):
        pair = start + tl.arange(0, CHUNK)
        of_pair = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1)
        counts += (of_pair == first_expert + expert).to(tl.int32)
    tl.store(counts_ptr + segment * tl.num_programs(0) + expert, tl.sum(counts, axis=0))


@kernel(do_not_specialize=["num_pairs", "segment_size", "first_expert"])
def align_pairs_kernel(
    experts_ptr,  # [num_pairs]
    counts_ptr,  # [segments, held experts]; read if there are more than COUNTED_SEGMENTS
    pairs_ptr,  # [max_blocks * BLOCK_SIZE]
    block_experts_ptr,  # [max_blocks]
    num_blocks_ptr,  # [1]
    num_pairs,
    segment_size,
    first_expert,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    MAX_SEGMENTS: tl.constexpr,
    COUNTED_SEGMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    expert = tl.program_id(0)
    num_experts = tl.num_programs(0)
    segment = tl.program_id(1)
    num_segments = tl.num_programs(1)
    other = tl.arange(0, BLOCK_EXPERTS)
    if num_segments <= COUNTED_SEGMENTS:
        counts = tl.zeros([BLOCK_EXPERTS], tl.int32)
        in_earlier = tl.zeros([BLOCK_EXPERTS], tl.int32)
        for start in range(0, num_pairs, CHUNK):
            pair = start + tl.arange(0, CHUNK)
            of_pair = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1) - first_expert
            of_chunk = tl.histogram(of_pair, BLOCK_EXPERTS, mask=(of_pair >= 0) & (of_pair < num_experts))
            counts += of_chunk
            in_earlier += tl.where(start < segment * segment_size, of_chunk, 0)
    else:
        row = tl.arange(0, MAX_SEGMENTS)
        # [MAX_SEGMENTS, BLOCK_EXPERTS]
        of_segments = tl.load(
            counts_ptr + row[:, None] * num_experts + other[None, :],
            mask=(row < num_segments)[:, None] & (other < num_experts)[None, :],
            other=0,
        )
        counts = tl.sum(of_segments, axis=0)
        in_earlier = tl.sum(tl.where((row < segment)[:, None], of_segments, 0), axis=0)
    blocks_of = (counts + BLOCK_SIZE - 1) // BLOCK_SIZE
    first_block = tl.sum(tl.where(other < expert, blocks_of, 0), axis=0)
    end_block = tl.sum(tl.where(other <= expert, blocks_of, 0), axis=0)
    place = first_block * BLOCK_SIZE + tl.sum(tl.where(other == expert, in_earlier, 0), axis=0)
    for start in range(segment * segment_size, tl.minimum((segment + 1) * segment_size, num_pairs), CHUNK):
        pair = start + tl.arange(0, CHUNK)
        mine = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1) == first_expert + expert
        number = mine.to(tl.int32)
        position = place + tl.cumsum(number, axis=0) - 1
        tl.store(pairs_ptr + position, pair, mask=mine)
        tl.store(block_experts_ptr + position // BLOCK_SIZE, expert, mask=mine & (position % BLOCK_SIZE == 0))
        place += tl.sum(number, axis=0)
    if segment == num_segments - 1:
        rest = place + tl.arange(0, BLOCK_SIZE)
        tl.store(pairs_ptr + rest, num_pairs, mask=rest < end_block * BLOCK_SIZE)
        if expert == num_experts - 1:
            tl.store(num_blocks_ptr, end_block)


def combine_pairs(pairs: torch.Tensor, experts: torch.Tensor, held: ExpertRange) -> torch.Tensor:
    """pairs [T, k, N], which has no meaning for pairs whose expert is not held; experts [T, k] int32 -> [T, N]"""
    if pairs.is_cpu and not INTERPRETED:
        return combine_pairs_reference(pairs, experts, held)
    num_tokens, k, size = pairs.shape
    assert pairs.is_contiguous()
    out = torch.empty((num_tokens, size), dtype=pairs.dtype, device=pairs.device)
    grid = (num_tokens, cdiv(size, BLOCK))
    combine_pairs_kernel[grid](
        pairs,
        None if held.is_all else experts,
        out,
        size,
        held.first,
        held.size,
        K=k,
        HOLDS_ALL=held.is_all,
        BLOCK=BLOCK,
    )
    return out


def combine_pairs_reference(pairs: torch.Tensor, experts: torch.Tensor, held: ExpertRange) -> torch.Tensor:
    if not held.is_all:
        pairs = pairs.masked_fill(~is_held(experts, held)[..., None], 0)
    total = pairs[:, 0].float()
    for choice in range(1, pairs.shape[1]):
        total = total + pairs[:, choice]
    return total.to(pairs.dtype)


@kernel(do_not_specialize=["first_expert", "num_held"])
def combine_pairs_kernel(
    pairs_ptr,  # [tokens, K, size]
    experts_ptr,  # [tokens, K], or nothing
    out_ptr,  # [tokens, size]
    size,
    first_expert,
    num_held,
    K: tl.constexpr,
    HOLDS_ALL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(K):
        pair = token * K + choice
        is_written = mask
        if not HOLDS_ALL:
            expert = tl.load(experts_ptr + pair) - first_expert
            is_written = mask & (expert >= 0) & (expert < num_held)
        total += tl.load(pairs_ptr + pair * size + column, mask=is_written, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * size + column, total, mask=mask)
