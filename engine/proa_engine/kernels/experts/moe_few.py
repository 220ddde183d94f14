"""Experts of few (token, expert) pairs, up to `MAX_PAIRS`: what the two products of such a step share.

With more pairs a layer's experts take four launches, and more with many of them or with quantized inputs: one sorts the
pairs by expert (`moe_pairs`), then product, product and sum. With up to `MAX_PAIRS` pairs they take two
(`moe_few_matmul`). Every program finds the rows of its block itself, from the experts of all pairs: as many numbers as
a warp or two load at once, so that nothing is sorted beforehand. The first product ends with the activation, the second
with the sum of each token's experts.
One or two tokens have kernels of their own if the experts are floats (`moe_skinny`).

A block is up to BLOCK_M pairs of one expert, in order. It belongs to its first pair: there is a program for each pair
and tile of outputs, and those of the other pairs return. Pairs of experts that the rank does not hold are in no block.

Numbers are rounded where they are with more pairs, and added in the same order: gate and up to x's type before the
activation, each pair's output before the sum, which is in the order of choice. The limit is chosen by shapes: 64 pairs
are 8 tokens of 8 experts, and with more of them blocks begin to fill. With one token and with two, a layer of
Qwen3-30B-A3B took 46.7 and 52.7 us on an H200, the choice of experts included. From 3 tokens on, the speed beside
sorted pairs has not been measured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from proa_engine.kernels.experts.moe_pairs import ExpertRange, combine_pairs_reference

MAX_PAIRS = 64
BLOCK_M = 16  # the fewest rows of tl.dot
BLOCK_N = 64  # rows of the weight that a program multiplies by

# None is a type's name in Triton, such as "int8", which its list of compiled variants would restore as that type.
WeightForm = Literal["floats", "fp8 by row", "fp8 by block", "int8 by row", "packed int4", "packed int8", "fp4"]
Product = Callable[..., torch.Tensor]  # [rows, inputs] -> [rows, outputs]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """One matrix of every expert that a rank holds, as the kernels read it."""

    form: WeightForm
    values: torch.Tensor  # [experts, outputs, inputs]; of fp4 and integers words as in their matrices
    scales: torch.Tensor | None  # as in `ExpertMatrices`; of fp4 and integers as in their matrices
    bias: torch.Tensor | None  # [experts, outputs]
    num_outputs: int
    num_inputs: int
    group: int = 0  # of integers: inputs that share a scale, 0: all


def few_gate_reference(
    x: torch.Tensor, experts: torch.Tensor, held: ExpertRange, products: Sequence[Product], activation: Product
) -> torch.Tensor:
    """Compute `few_gate` with the product of each held expert. Zeros for pairs of other experts."""
    (num_tokens, k), hidden = experts.shape, None
    for number, product in zip(held.numbers, products, strict=True):
        token, choice = (experts == number).nonzero(as_tuple=True)
        y = activation(product(x[token]))
        hidden = y.new_zeros(num_tokens * k, y.shape[1]) if hidden is None else hidden
        hidden[token * k + choice] = y
    assert hidden is not None
    return hidden


def few_combine_reference(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    held: ExpertRange,
    products: Sequence[Product],
) -> torch.Tensor:
    """Compute `few_combine` with the product of each held expert."""
    (num_tokens, k), pairs = experts.shape, None
    for number, product in zip(held.numbers, products, strict=True):
        token, choice = (experts == number).nonzero(as_tuple=True)
        y = product(hidden[token * k + choice]) * weights[token, choice, None]
        pairs = hidden.new_zeros(num_tokens, k, y.shape[1]) if pairs is None else pairs
        pairs[token, choice] = y.to(hidden.dtype)
    assert pairs is not None
    return combine_pairs_reference(pairs, experts, held)


@triton.jit
def find_block(
    experts_ptr,  # [num_pairs]
    pair,
    num_pairs,
    first_expert,
    num_held,
    MAX_PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Find the block that begins with `pair`.

    Returns the expert, counted from the first that is held; the block's pairs [BLOCK_M], num_pairs: padding; whether
    there is such a block; and the number of all pairs whose experts are held.
    """
    other = tl.arange(0, MAX_PAIRS)
    experts = tl.load(experts_ptr + other, mask=other < num_pairs, other=-1) - first_expert
    expert = tl.load(experts_ptr + pair) - first_expert
    is_same = experts == expert
    place = tl.sum((is_same & (other < pair)).to(tl.int32), axis=0)  # among the expert's pairs
    row_of = tl.cumsum(is_same.to(tl.int32), axis=0) - 1 - place
    row = tl.arange(0, BLOCK_M)
    is_in_row = is_same[None, :] & (row_of[None, :] == row[:, None])
    pairs = tl.min(tl.where(is_in_row, other[None, :], num_pairs), axis=1)
    begins = (expert >= 0) & (expert < num_held) & (place % BLOCK_M == 0)
    num_held_pairs = tl.sum(((experts >= 0) & (experts < num_held)).to(tl.int32), axis=0)
    return expert.to(tl.int64), pairs.to(tl.int64), begins, num_held_pairs


@triton.jit
def sum_tokens(
    pairs_ptr,  # [num_pairs, num_outputs]; rows of experts that are not held have no meaning
    out_ptr,  # [num_pairs / K, num_outputs]
    experts_ptr,  # [num_pairs]
    column,  # [N]
    num_pairs,
    first_expert,
    num_held,
    num_outputs,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Sum the K pairs of each token, in order, in these columns."""
    num_tokens = num_pairs // K
    column_mask = column < num_outputs
    for first in tl.range(0, num_tokens, BLOCK_M, num_stages=1):
        token = first + tl.arange(0, BLOCK_M)
        token_mask = token < num_tokens
        total = tl.zeros([BLOCK_M, column.shape[0]], tl.float32)
        for choice in tl.static_range(K):
            pair = token * K + choice
            expert = tl.load(experts_ptr + pair, mask=token_mask, other=-1) - first_expert
            is_written = (expert >= 0) & (expert < num_held)
            total += tl.load(
                pairs_ptr + pair[:, None] * num_outputs + column[None, :],
                mask=is_written[:, None] & column_mask[None, :],
                other=0.0,
                cache_modifier=".cg",
            ).to(tl.float32)
        tl.store(
            out_ptr + token[:, None] * num_outputs + column[None, :],
            total,
            mask=token_mask[:, None] & column_mask[None, :],
        )
