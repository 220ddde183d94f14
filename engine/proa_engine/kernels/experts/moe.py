"""Mixture of experts: a weighted sum of the outputs of each token's k experts, which are feed-forward networks, most of
them gated.

On a GPU (token, expert) pairs are sorted by expert on the device and multiplied in two launches for all experts, but
for few pairs (`moe_few`) and one or two tokens (`moe_skinny`), which are not sorted. On a CPU, the reference: a loop
over the experts in use. A rank may hold a range of the experts; its sums are then of these alone.

`moe_matmul` multiplies each block of rows by its expert's matrix: rows are gathered by token and stored by pair.
Weights are floats, 8-bit floats with scales as in `fp8_linear`, or 8-bit integers as in `int8_linear`. A program
computes a tile [BLOCK_M, BLOCK_N].
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import triton.language as tl

from proa_engine.kernels.experts.moe_few import MAX_PAIRS, ExpertWeights, WeightForm
from proa_engine.kernels.experts.moe_few_matmul import few_experts
from proa_engine.kernels.experts.moe_pairs import (
    ExpertBlocks,
    ExpertRange,
    align_pairs,
    combine_pairs,
)
from proa_engine.kernels.experts.moe_product import NO_ACTIVATION, multiply_by_pairs, store_pairs, tile_rows_of_weight
from proa_engine.kernels.experts.moe_skinny import is_skinny, skinny_experts
from proa_engine.kernels.fp8 import FP8, Fp8Form, QuantizedRows, check_device, quantize
from proa_engine.kernels.int8 import Int8Form, quantize_int8
from proa_engine.kernels.launch import begin, kernel
from proa_engine.kernels.silu_and_mul import silu_and_mul, silu_and_mul_fp8
from proa_engine.kernels.tilings import tilings_of

SCALE_BLOCK = 128

ExpertForm = Fp8Form | Int8Form
Product = Callable[..., torch.Tensor]  # [rows, inputs] -> [rows, outputs]


class ExpertActivation(Protocol):
    """x [rows, 2N] of [gate | up], or [rows, N] of experts without a gate -> [rows, N]"""

    @property
    def constants(self) -> dict[str, object]:
        """The constants of the kernels' `activate_product`."""
        ...

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor: ...


@dataclass(frozen=True, eq=False)  # without slots: `parameters()` of a model finds tensors by `vars`
class ExpertMatrices:
    """One matrix of every expert."""

    weight: torch.Tensor  # [experts, outputs, inputs]
    scales: torch.Tensor | None = None  # [experts, outputs], or [experts, ceil(outputs / 128), inputs / 128]
    bias: torch.Tensor | None = None  # [experts, outputs]

    def __post_init__(self) -> None:
        if self.weight.dtype == FP8:
            check_device(self.weight.device)

    @property
    def num_experts(self) -> int:
        return self.weight.shape[0]

    @property
    def unsorted(self) -> ExpertWeights:
        form: WeightForm = "floats"
        if self.scales is not None:
            form = "fp8 by row" if self.scales.dim() == 2 else "fp8 by block"
        if self.weight.dtype == torch.int8:
            form = "int8 by row"
        return ExpertWeights(form, self.weight, self.scales, self.bias, *self.weight.shape[1:])

    def multiply(
        self,
        x: torch.Tensor | QuantizedRows,
        blocks: ExpertBlocks,
        pair_weights: torch.Tensor | None,
        k: int,
        activation: Mapping[str, object] = NO_ACTIVATION,
    ) -> torch.Tensor:
        """x [T, inputs], or [T * k, inputs] with `pair_weights` [T, k] -> [T * k, outputs], each row times its pair's
        weight.

        `activation`: the constants of an `ExpertActivation` of the outputs; quantized rows have none. GPU only; its
        reference is `LoopedExperts`.
        """
        return moe_matmul(x, self, blocks, pair_weights, k, activation)


def moe_matmul(
    x: torch.Tensor | QuantizedRows,
    matrices: ExpertMatrices,
    blocks: ExpertBlocks,
    pair_weights: torch.Tensor | None,
    k: int,
    activation: Mapping[str, object],
) -> torch.Tensor:
    """See `ExpertMatrices.multiply`."""
    values, x_scales = (x.values, x.scales) if isinstance(x, QuantizedRows) else (x, None)
    weight = matrices.weight
    assert values.is_contiguous()
    assert values.shape[1] == weight.shape[2]
    assert weight.is_contiguous()
    assert (x_scales is None) == (matrices.scales is None)
    assert matrices.scales is None or activation is NO_ACTIVATION
    in_blocks = matrices.scales is not None and matrices.scales.dim() == 3
    return multiply_by_pairs(
        moe_matmul_kernel,
        values,
        (x_scales, weight, matrices.scales, matrices.bias),
        blocks,
        pair_weights,
        k,
        activation,
        weight_rows=weight.shape[1],
        tile=tilings_of(values.device).experts[blocks.block_size],
        dtype=x.dtype,
        SCALES=0 if matrices.scales is None else 2 if in_blocks else 1,
        HAS_BIAS=matrices.bias is not None,
        BLOCK_K=128 // weight.element_size() if weight.element_size() > 1 else SCALE_BLOCK,
    )


def rows_per_block(num_pairs: int, num_experts: int) -> int:
    """Choose the rows of a block from the mean number of pairs of an expert.

    Every block of an expert reads the expert's weights, which takes longer than computing rows of padding. A block has
    more rows than the mean, so that most experts need one block while the mean is below 48. Warm-up runs powers of two
    tokens, so each limit is at least twice the one before it, the first of which is `MAX_PAIRS`: up to twice as many
    pairs have blocks of one size.
    """
    mean = max(num_pairs, 2 * MAX_PAIRS) // num_experts
    return 16 if mean < 8 else 32 if mean < 20 else 64 if mean < 48 else 128


@kernel(do_not_specialize=["num_pairs"])
def moe_matmul_kernel(
    x_ptr,  # [num_pairs / ROWS_PER_INPUT, num_inputs]
    x_scales_ptr,  # [num_pairs / ROWS_PER_INPUT, 1 or num_inputs / BLOCK_K], or nothing
    weight_ptr,  # [experts, PARTS * num_outputs, num_inputs], of x's type
    weight_scales_ptr,  # [experts, num_outputs], [experts, ceil(num_outputs / BLOCK_K), num_inputs / BLOCK_K], nothing
    bias_ptr,  # [experts, PARTS * num_outputs], or nothing
    out_ptr,  # [num_pairs, num_outputs]
    pair_weights_ptr,  # [num_pairs], or nothing
    pairs_ptr,  # [max_blocks * BLOCK_M]
    block_experts_ptr,  # [max_blocks]
    num_blocks_ptr,  # [1]
    num_pairs,
    num_outputs,
    num_inputs,
    ROWS_PER_INPUT: tl.constexpr,
    SCALES: tl.constexpr,  # 0: none; 1: of rows and outputs; 2: of blocks
    HAS_BIAS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PARTS: tl.constexpr,  # `rows_per_output`; 1 with scales
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # rows of the weight, PARTS for each output
    BLOCK_K: tl.constexpr,
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
    row_mask = pair < num_pairs
    row = pair // ROWS_PER_INPUT
    first = tile_n * (BLOCK_N // PARTS)
    column, column_mask = tile_rows_of_weight(first, num_outputs, PARTS, BLOCK_N)
    first_column = expert * PARTS * num_outputs  # of the expert
    inner = tl.arange(0, BLOCK_K)
    x_place = x_ptr + row[:, None] * num_inputs + inner[None, :]
    weight_place = weight_ptr + (first_column + column[None, :]) * num_inputs + inner[:, None]
    num_groups = num_inputs // BLOCK_K
    block_scales = weight_scales_ptr  # of this tile's outputs, where they lie in blocks
    if SCALES == 2:
        block_scales += (expert * tl.cdiv(num_outputs, BLOCK_K) + tile_n * BLOCK_N // BLOCK_K) * num_groups
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if weight_ptr.dtype.element_ty == tl.int8 else tl.float32)
    for start in range(0, num_inputs, BLOCK_K):
        inner_mask = start + inner < num_inputs
        x = tl.load(x_place + start, mask=row_mask[:, None] & inner_mask[None, :], other=0.0)
        weight = tl.load(weight_place + start, mask=column_mask[None, :] & inner_mask[:, None], other=0.0)
        if SCALES == 2:
            group = start // BLOCK_K
            x_scale = tl.load(x_scales_ptr + row * num_groups + group, mask=row_mask, other=0.0)
            total += tl.dot(x, weight) * (x_scale * tl.load(block_scales + group))[:, None]
        else:
            total = tl.dot(x, weight, total, input_precision="ieee", out_dtype=total.dtype)
    if SCALES == 1:
        x_scale = tl.load(x_scales_ptr + row, mask=row_mask, other=0.0)
        weight_scale = tl.load(weight_scales_ptr + first_column + column, mask=column_mask, other=0.0)
        total = total.to(tl.float32) * x_scale[:, None] * weight_scale[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + first_column + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
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


class StackedMatrices(Protocol):
    """One matrix of every expert: `ExpertMatrices`, or another type of numbers."""

    @property
    def num_experts(self) -> int: ...

    @property
    def unsorted(self) -> ExpertWeights:
        """As kernels of unsorted pairs read them."""
        ...

    def multiply(
        self,
        x: torch.Tensor | QuantizedRows,
        blocks: ExpertBlocks,
        pair_weights: torch.Tensor | None,
        k: int,
        activation: Mapping[str, object] = NO_ACTIVATION,
    ) -> torch.Tensor:
        """As `ExpertMatrices.multiply`."""
        ...


class FusedExperts:
    """The GPU's experts. `gate_up` holds each expert's gate and up rows, or those of up without a gate.

    `form` is how the inputs of 8-bit matrices are quantized, symmetric; `down_form` is that of `down`, if another. The
    matrices are those of `held`; None: of all experts.
    """

    def __init__(
        self,
        gate_up: StackedMatrices,
        down: StackedMatrices,
        form: ExpertForm | None = None,
        activation: ExpertActivation = silu_and_mul,
        held: ExpertRange | None = None,
        down_form: ExpertForm | None = None,
    ) -> None:
        self.gate_up = gate_up
        self.down = down
        self.form = form
        self.down_form = down_form or form
        self.activation = activation
        self.held = held or ExpertRange.all(gate_up.num_experts)

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """x [T, N]; weights [T, k] float32 and experts [T, k] int32 from `route` -> [T, N]"""
        if experts.numel() <= MAX_PAIRS:
            return self._unsorted(x, weights, experts)
        (num_tokens, k), held = experts.shape, self.held
        blocks = align_pairs(experts, held, rows_per_block(experts.numel(), held.total))
        # The rows of pairs whose expert is not held are never written, and never read by the second product.
        pairs = self.down.multiply(self._hidden(x, blocks, k), blocks, weights, k)
        return combine_pairs(pairs.view(num_tokens, k, -1), experts, held)

    def _unsorted(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        gate_up, down, activation = self.gate_up.unsorted, self.down.unsorted, self.activation.constants
        if is_skinny(experts, gate_up, down):
            return skinny_experts(x, weights, experts, self.held, gate_up, down, activation)
        forms = self.form, self.down_form
        return few_experts(x, weights, experts, self.held, gate_up, down, activation, forms)

    def _hidden(self, x: torch.Tensor, blocks: ExpertBlocks, k: int) -> torch.Tensor | QuantizedRows:
        """x [T, N] -> the rows by which `down` is multiplied, [T * k, width]"""
        if self.form is None or self.down_form is None:
            return self.gate_up.multiply(x, blocks, None, k, self.activation.constants)
        hidden = self.gate_up.multiply(_quantized(x, self.form), blocks, None, k)
        if isinstance(self.down_form, Fp8Form) and self.activation is silu_and_mul:
            return silu_and_mul_fp8(hidden, self.down_form)
        return _quantized(self.activation(hidden), self.down_form)


def _quantized(x: torch.Tensor, form: ExpertForm) -> QuantizedRows:
    return quantize_int8(x, form) if isinstance(form, Int8Form) else quantize(x, form)


class LoopedExperts:
    """The CPU's experts, and the reference: one product for `gate_up` and one for `down` of each expert of `held`;
    None: of all."""

    def __init__(
        self,
        gate_up: Sequence[Product],
        down: Sequence[Product],
        activation: ExpertActivation = silu_and_mul,
        held: ExpertRange | None = None,
    ) -> None:
        self.gate_up = list(gate_up)
        self.down = list(down)
        self.activation = activation
        self.held = held or ExpertRange.all(len(self.gate_up))

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Shapes as in `FusedExperts`."""
        pairs, held = torch.empty((*experts.shape, x.shape[1]), dtype=x.dtype), self.held
        for expert in experts.unique().tolist():
            if expert not in held.numbers:
                continue
            local = expert - held.first
            token, choice = (experts == expert).nonzero(as_tuple=True)
            y = self.down[local](self.activation(self.gate_up[local](x[token])))
            pairs[token, choice] = (y * weights[token, choice, None]).to(x.dtype)
        return combine_pairs(pairs, experts, held)
