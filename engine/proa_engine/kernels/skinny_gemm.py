"""Skinny products: products of so few rows that they take as long as reading the weight. Their limits and tiling, and
rows whose norm such a product computes itself.

A program holds whole rows, and the part of the weight that it multiplies, in registers.
"""

from dataclasses import dataclass

import torch

from proa_engine.kernels.device import num_multiprocessors
from proa_engine.kernels.sizes import cdiv, next_power_of_2

MAX_ROWS = 2  # with more rows the arithmetic takes longer than reading the weight
MAX_INPUTS = 16384  # a row must fit in a program's registers
MAX_INPUTS_OF_TWO_ROWS = 8192  # with more, two rows would spill registers
WARPS_PER_MULTIPROCESSOR = 16  # with 128 registers a thread
THREAD_BYTES = (
    128  # bytes of the weight in flight for each thread: 64 KB a multiprocessor, twice latency times bandwidth
)
FULL_ENOUGH = 0.9  # least share of the programs that work in the average round


@dataclass(frozen=True, slots=True)
class SkinnyGemm:
    """Input form of a product that computes the norm of few rows itself."""

    max_rows: int = MAX_ROWS

    def holds(self, num_rows: int) -> bool:
        return 0 < num_rows <= self.max_rows


def skinny_gemm_form(weight: torch.Tensor) -> SkinnyGemm | None:
    """The input form of products by `weight` [N, K]; None if they have no skinny kernel."""
    fits = not weight.is_cpu and weight.shape[1] <= MAX_INPUTS and weight.numel() < 1 << 31
    return SkinnyGemm(MAX_ROWS if weight.shape[1] <= MAX_INPUTS_OF_TWO_ROWS else 1) if fits else None


@dataclass(frozen=True, slots=True, eq=False)
class UnnormedRows:
    """norm(x + residual) [T, K] before it is computed; the product that reads it computes it."""

    x: torch.Tensor  # [T, K]
    residual: torch.Tensor | None  # [T, K]
    total: torch.Tensor  # [T, K]: x + residual, once the product has run; x itself without a residual
    weight: torch.Tensor  # [K], the norm's
    eps: float

    @property
    def shape(self) -> torch.Size:
        return self.x.shape


def unnormed_rows(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> UnnormedRows:
    # The sum is a new tensor, because all programs read the residual while one writes the sum.
    return UnnormedRows(x, residual, x if residual is None else torch.empty_like(residual), weight, eps)


@dataclass(frozen=True, slots=True)
class Tiling:
    num_programs: int
    block_n: int  # outputs that a program computes in a round
    block_k: int
    num_warps: int


def choose_tiling(num_outputs: int, num_inputs: int, parts: int, item_bytes: int, device: torch.device) -> Tiling:
    """Tiling for a weight with `parts` rows for each output. It does not depend on the number of rows, nor do their
    bits."""
    block_k = next_power_of_2(num_inputs)
    num_warps = 4 if block_k <= 1024 else 8 if block_k <= 4096 else 16
    slots = num_multiprocessors(device) * WARPS_PER_MULTIPROCESSOR // num_warps
    block_n = max(THREAD_BYTES * 32 * num_warps // (block_k * item_bytes * parts), 1)
    while block_n > 1 and _share_of_slots(cdiv(num_outputs, block_n), slots) < FULL_ENOUGH:
        block_n //= 2
    return Tiling(min(slots, cdiv(num_outputs, block_n)), block_n, block_k, num_warps)


def _share_of_slots(num_blocks: int, slots: int) -> float:
    """Share of the programs that work in the average round."""
    num_rounds = -(-num_blocks // slots)
    return num_blocks / (num_rounds * slots)
