"""Group (token, expert) pairs by expert into blocks of rows, each of one expert, on the device: a counting sort.

Two launches with one program for each expert. The first counts the expert's pairs. The second computes the expert's
first block from the counts of the experts before it and writes its pairs there, in order. The host knows only an upper
bound of the number of blocks.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from proa_engine.kernels.dependent_launch import dependent_launch

CHUNK = 1024  # pairs processed at once


@dataclass(frozen=True, slots=True, eq=False)
class ExpertBlocks:
    """Pair p is choice p % k of token p // k."""

    pairs: torch.Tensor  # [max_blocks * block_size] int32, grouped by expert; the value num_pairs: padding
    experts: torch.Tensor  # [max_blocks] int32: the expert of each block
    num_blocks: torch.Tensor  # [1] int32: blocks in use; what lies behind them has no meaning
    max_blocks: int
    block_size: int


def align_pairs(experts: torch.Tensor, num_experts: int, block_size: int) -> ExpertBlocks:
    """experts [T, k] int32"""
    num_pairs = experts.numel()
    # Each expert in use may leave one block partly empty.
    max_blocks = min(num_pairs, num_pairs // block_size + num_experts)
    empty = experts.new_empty
    counts = empty(num_experts)
    blocks = ExpertBlocks(
        pairs=empty(max_blocks * block_size),
        experts=empty(max_blocks),
        num_blocks=empty(1),
        max_blocks=max_blocks,
        block_size=block_size,
    )
    count_pairs_kernel[(num_experts,)](experts, counts, num_pairs, CHUNK=CHUNK, **dependent_launch())
    align_pairs_kernel[(num_experts,)](
        experts,
        counts,
        blocks.pairs,
        blocks.experts,
        blocks.num_blocks,
        num_pairs,
        num_experts,
        BLOCK_SIZE=block_size,
        BLOCK_EXPERTS=triton.next_power_of_2(num_experts),
        CHUNK=CHUNK,
        **dependent_launch(),
    )
    return blocks


@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs_kernel(experts_ptr, counts_ptr, num_pairs, CHUNK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0)
    counts = tl.zeros([CHUNK], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        counts += (tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(counts, axis=0))


@triton.jit(do_not_specialize=["num_pairs"])
def align_pairs_kernel(
    experts_ptr,  # [num_pairs]
    counts_ptr,  # [num_experts]
    pairs_ptr,  # [max_blocks * BLOCK_SIZE]
    block_experts_ptr,  # [max_blocks]
    num_blocks_ptr,  # [1]
    num_pairs,
    num_experts,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0)
    other = tl.arange(0, BLOCK_EXPERTS)
    blocks_of = (tl.load(counts_ptr + other, mask=other < num_experts, other=0) + BLOCK_SIZE - 1) // BLOCK_SIZE
    first_block = tl.sum(tl.where(other < expert, blocks_of, 0), axis=0)
    num_blocks = tl.sum(tl.where(other == expert, blocks_of, 0), axis=0)
    if expert == num_experts - 1:
        tl.store(num_blocks_ptr, first_block + num_blocks)
    for block in range(first_block, first_block + num_blocks):
        tl.store(block_experts_ptr + block, expert)
    place = first_block * BLOCK_SIZE
    for start in range(0, num_pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        mine = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1) == expert
        number = mine.to(tl.int32)
        tl.store(pairs_ptr + place + tl.cumsum(number, axis=0) - 1, pair, mask=mine)
        place += tl.sum(number, axis=0)
    rest = place + tl.arange(0, BLOCK_SIZE)
    tl.store(pairs_ptr + rest, num_pairs, mask=rest < (first_block + num_blocks) * BLOCK_SIZE)
