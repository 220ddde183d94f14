"""Few rows: so few that a product with them takes as long as reading its weight. Which they are, how the work is cut,
and rows that such a product normalises itself.

A program holds whole rows, and the weight's part that it works on, in registers. Knows no kernel.
"""

from dataclasses import dataclass

import torch
import triton

from proa_engine.kernels.device import num_multiprocessors

MAX_ROWS = 2  # with more, a weight's number costs more arithmetic and registers than reading it hides
MAX_INPUTS = 16384  # of a row in a program's registers
WARPS_PER_MULTIPROCESSOR = 16  # of 128 registers a thread
THREAD_BYTES = 128  # of the weight, on their way to a thread: 64 KB a multiprocessor, twice latency times bandwidth
FULL_ENOUGH = 0.9  # of the programs work in the average round


@dataclass(frozen=True, slots=True)
class SkinnyGemm:
    """The form in which a product wants its input that takes few rows before their norm is worked out."""

    max_rows: int = MAX_ROWS

    def holds(self, num_rows: int) -> bool:
        return 0 < num_rows <= self.max_rows


def skinny_gemm_form(weight: torch.Tensor) -> SkinnyGemm | None:
    """That of products by `weight` [N, K], if any number of rows is few to it."""
    fits = not weight.is_cpu and weight.shape[1] <= MAX_INPUTS and weight.numel() < 1 << 31
    return SkinnyGemm() if fits else None


@dataclass(frozen=True, slots=True, eq=False)
class UnnormedRows:
    """What stands for norm(x + residual), [T, K], until the product that reads it works it out."""

    x: torch.Tensor  # [T, K]
    residual: torch.Tensor | None  # [T, K]
    total: torch.Tensor  # [T, K]: x + residual, once the product has run; x itself without a residual
    weight: torch.Tensor  # [K], the norm's
    eps: float

    @property
    def shape(self) -> torch.Size:
        return self.x.shape


def unnormed_rows(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> UnnormedRows:
    # In memory of its own: every program reads the residual, and one writes the sum.
    return UnnormedRows(x, residual, x if residual is None else torch.empty_like(residual), weight, eps)


@dataclass(frozen=True, slots=True)
class Tiling:
    num_programs: int
    block_n: int  # outputs of a program's round
    block_k: int
    num_warps: int


def choose_tiling(num_outputs: int, num_inputs: int, parts: int, item_bytes: int, device: torch.device) -> Tiling:
    """For a weight of `parts` rows an output. The same for every number of rows, so that their bits are."""
    block_k = triton.next_power_of_2(num_inputs)
    num_warps = 4 if block_k <= 1024 else 8 if block_k <= 4096 else 16
    slots = num_multiprocessors(device) * WARPS_PER_MULTIPROCESSOR // num_warps
    block_n = max(THREAD_BYTES * 32 * num_warps // (block_k * item_bytes * parts), 1)
    while block_n > 1 and _share_of_slots(triton.cdiv(num_outputs, block_n), slots) < FULL_ENOUGH:
        block_n //= 2
    return Tiling(min(slots, triton.cdiv(num_outputs, block_n)), block_n, block_k, num_warps)


def _share_of_slots(num_blocks: int, slots: int) -> float:
    """That work in the average round."""
    num_rounds = -(-num_blocks // slots)
    return num_blocks / (num_rounds * slots)
