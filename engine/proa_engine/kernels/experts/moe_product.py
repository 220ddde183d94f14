"""The products of sorted (token, expert) pairs (`moe_pairs`): what those of all forms of weights share.

The product by gate and up ends with the activation: a tile's rows of the weight are gate's and up's in turn, so that it
has both of its outputs. Experts without a gate have up alone.
"""

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl

from proa_engine.kernels.experts.moe_pairs import ExpertBlocks
from proa_engine.kernels.launch import Kernel, cdiv
from proa_engine.kernels.silu_and_mul import activate_product
from proa_engine.kernels.tilings import ProductTile

NO_ACTIVATION: Mapping[str, object] = {"ACTIVATION": "none", "ALPHA": 0.0, "LIMIT": 0.0}


def rows_per_output(activation: Mapping[str, object]) -> int:
    """The rows of the weight for each output of a product with this activation: of gate and up, or one."""
    return 1 if activation["ACTIVATION"] in ("none", "relu_squared") else 2


def multiply_by_pairs(
    matmul_kernel: Kernel,
    x: torch.Tensor,
    operands: Sequence[torch.Tensor | None],
    blocks: ExpertBlocks,
    pair_weights: torch.Tensor | None,
    k: int,
    activation: Mapping[str, object],
    *,
    weight_rows: int,
    tile: ProductTile,
    dtype: torch.dtype,
    **constants: object,
) -> torch.Tensor:
    """x [T, inputs], or [T * k, inputs] with `pair_weights` [T, k] -> [T * k, outputs] of `dtype`, by a kernel of one
    product for all experts, whose `operands` follow x.

    `activation`: the constants of `activate_product`, or `NO_ACTIVATION`. `weight_rows`: of an expert's matrix.
    """
    by_pair, parts = pair_weights is not None, rows_per_output(activation)
    num_pairs, num_inputs = x.shape[0] * (1 if by_pair else k), x.shape[1]
    num_outputs = weight_rows // parts
    out = torch.empty((num_pairs, num_outputs), dtype=dtype, device=x.device)
    matmul_kernel[(blocks.max_blocks * cdiv(num_outputs, tile.outputs // parts),)](
        x,
        *operands,
        out,
        pair_weights,
        blocks.pairs,
        blocks.experts,
        blocks.num_blocks,
        num_pairs,
        num_outputs,
        num_inputs,
        ROWS_PER_INPUT=1 if by_pair else k,
        WEIGHTED=by_pair,
        **activation,
        PARTS=parts,
        BLOCK_M=blocks.block_size,
        BLOCK_N=tile.outputs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **constants,
    )
    return out


@triton.jit
def tile_rows_of_weight(first, num_outputs, PARTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the rows of an expert's weight for the outputs from `first` on, [BLOCK_N], and the mask of those that
    exist: with two PARTS gate's and up's in turn."""
    turn = tl.arange(0, BLOCK_N)
    output = first + turn // PARTS
    return output + turn % PARTS * num_outputs, output < num_outputs


@triton.jit
def store_pairs(
    out_ptr,  # [num_pairs, num_outputs]
    total,  # [BLOCK_M, BLOCK_N] float32: the products of `pair` and `tile_rows_of_weight`
    pair_weights_ptr,  # [num_pairs], or nothing
    pair,  # [BLOCK_M]
    first,  # output of the tile
    num_pairs,
    num_outputs,
    WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The end of a product's program: store the outputs, times their pair's weight or after the activation, before
    which they are rounded to the type of `out`."""
    row_mask = pair < num_pairs
    if WEIGHTED:
        total = total * tl.load(pair_weights_ptr + pair, mask=row_mask, other=0.0)[:, None]
    if ACTIVATION != "none":
        total = activate_product(total.to(out_ptr.dtype.element_ty).to(tl.float32), ACTIVATION, ALPHA, LIMIT)
    output = first + tl.arange(0, BLOCK_N // PARTS)
    tl.store(
        out_ptr + pair[:, None] * num_outputs + output[None, :],
        total,
        mask=row_mask[:, None] & (output < num_outputs)[None, :],
    )
