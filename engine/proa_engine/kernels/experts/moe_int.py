"""One product for all experts by integer weights (`int_weights`), dequantized in registers."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton.language as tl

from proa_engine.kernels.experts.moe_few import ExpertWeights, WeightForm
from proa_engine.kernels.experts.moe_pairs import ExpertBlocks
from proa_engine.kernels.experts.moe_product import NO_ACTIVATION, multiply_by_pairs, store_pairs, tile_rows_of_weight
from proa_engine.kernels.fp8 import QuantizedRows
from proa_engine.kernels.int_weights import IntWeight, PackedIntWeight, int_tile, pack_int
from proa_engine.kernels.launch import begin, kernel
from proa_engine.kernels.tilings import tilings_of


@dataclass(frozen=True, eq=False)  # without slots, as `ExpertMatrices`
class IntMatrices(PackedIntWeight):
    """One matrix of every expert, without an `order`."""

    @property
    def num_experts(self) -> int:
        return self.words.shape[0]

    @property
    def unsorted(self) -> ExpertWeights:
        form: WeightForm = "packed int4" if self.bits == 4 else "packed int8"
        return ExpertWeights(form, self.words, self.scales, None, self.words.shape[2], self.num_inputs, self.group)

    def multiply(
        self,
        x: torch.Tensor | QuantizedRows,
        blocks: ExpertBlocks,
        pair_weights: torch.Tensor | None,
        k: int,
        activation: Mapping[str, object] = NO_ACTIVATION,
    ) -> torch.Tensor:
        """As `ExpertMatrices.multiply`."""
        assert isinstance(x, torch.Tensor)
        return moe_int_matmul(x, self, blocks, pair_weights, k, activation)


def pack_experts(weight: IntWeight) -> IntMatrices:
    """`weight`: the matrices of all experts, stacked."""
    packed = pack_int(weight)
    return IntMatrices(packed.words, packed.scales, packed.bits, packed.num_inputs, packed.group)


def moe_int_matmul(
    x: torch.Tensor,
    matrices: IntMatrices,
    blocks: ExpertBlocks,
    pair_weights: torch.Tensor | None,
    k: int,
    activation: Mapping[str, object],
) -> torch.Tensor:
    """See `ExpertMatrices.multiply`."""
    assert x.is_contiguous()
    assert x.shape[1] == matrices.num_inputs
    return multiply_by_pairs(
        moe_int_matmul_kernel,
        x,
        (matrices.words, matrices.scales),
        blocks,
        pair_weights,
        k,
        activation,
        weight_rows=matrices.words.shape[2],
        tile=tilings_of(x.device).packed_int_experts[blocks.block_size],
        dtype=x.dtype,
        BITS=matrices.bits,
        GROUP=matrices.group,
    )


@kernel(do_not_specialize=["num_pairs"])
def moe_int_matmul_kernel(
    x_ptr,  # [num_pairs / ROWS_PER_INPUT, num_inputs]
    words_ptr,  # [experts, blocks, PARTS * num_outputs, 16]
    scales_ptr,  # [experts, groups, PARTS * num_outputs]
    out_ptr,  # [num_pairs, num_outputs]
    pair_weights_ptr,  # [num_pairs], or nothing
    pairs_ptr,  # [max_blocks * BLOCK_M]
    block_experts_ptr,  # [max_blocks]
    num_blocks_ptr,  # [1]
    num_pairs,
    num_outputs,
    num_inputs,
    ROWS_PER_INPUT: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PARTS: tl.constexpr,  # `rows_per_output`
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # rows of the weight, PARTS for each output
    PDL: tl.constexpr,
):
    begin(PDL)
    tiles_n = tl.cdiv(num_outputs, BLOCK_N // PARTS)
    block = tl.program_id(0) // tiles_n
    if block >= tl.load(num_blocks_ptr):  # the grid is an upper bound
        return
    tile_n = tl.program_id(0) % tiles_n
    expert = tl.load(block_experts_ptr + block).to(tl.int64)
    pair = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    first = tile_n * (BLOCK_N // PARTS)
    column, column_mask = tile_rows_of_weight(first, num_outputs, PARTS, BLOCK_N)
    total = int_tile(
        x_ptr,
        words_ptr,
        scales_ptr,
        pair // ROWS_PER_INPUT,
        pair < num_pairs,
        num_inputs,
        expert,
        column,
        column_mask,
        PARTS * num_outputs,
        num_inputs,
        BITS,
        GROUP,
        BLOCK_M,
        BLOCK_N,
    )
    store_pairs(
        out_ptr,
        total,
        pair_weights_ptr,
        pair,
        first,
        num_pairs,
        num_outputs,
        WEIGHTED,
        ACTIVATION,
        ALPHA,
        LIMIT,
        PARTS,
        BLOCK_N,
    )
