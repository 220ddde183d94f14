"""The tiles of each kind of GPU, by its compute capability: to tune kernels for another one, add an entry to `TILINGS`.

Measured on an H200 (docs/performance.md), and made smaller where a program has less shared memory. Tiles that follow
from a tensor's shape alone are chosen beside their kernels: skinny products, decodes, and what one program computes a
row of. So are those of `prefill_hopper`, which runs on Hopper only.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

from proa_engine.kernels.launch import INTERPRETED, capability

HEAD_WIDTHS = (64, 128, 256, 512)  # of the columns of `PrefillTiles`


class ProductTile(NamedTuple):
    outputs: int
    num_warps: int
    num_stages: int


class FewRowsTile(NamedTuple):
    outputs: int
    input_bytes: int  # of each row of the weight
    num_stages: int
    num_warps: int


class InvariantTile(NamedTuple):
    outputs: int
    inputs: int
    num_stages: int


class RouterTile(NamedTuple):
    weight_numbers: int  # that a program holds in shared memory, beside 32 KiB of rows; 0: they do not fit
    num_warps: int


class PrefillTile(NamedTuple):
    rows: int
    tokens: int
    num_warps: int


# By the rows of a tile: 16, 32, 64 or 128.
ProductTiles = Mapping[int, ProductTile]
FewRowsTiles = Mapping[int, FewRowsTile]
# One for each of HEAD_WIDTHS.
PrefillTiles = tuple[PrefillTile, PrefillTile, PrefillTile, PrefillTile]


@dataclass(frozen=True, slots=True)
class Tilings:
    # Products of few rows. Narrow tiles run at the same time, one on a multiprocessor; wide ones are for weights that
    # have more tiles than that. None: not measured; a GPU may lack the shared memory, 144 KiB with 128 rows of fp8.
    few_rows: tuple[FewRowsTiles, FewRowsTiles] | None
    router: RouterTile
    fp8_blocks: ProductTiles
    int8: ProductTiles
    packed_ints: ProductTiles
    fp4: ProductTiles
    # Programs that a multiprocessor should run, by rows of a tile. It then has 48 KB of the weight in flight or, with
    # many rows, its registers are full.
    fp4_programs: Mapping[int, int]
    # Batch-invariant products: of 32 bits, and of 16 with few and with many outputs. 96 KB in flight a program. They
    # must not depend on the rows.
    invariant: tuple[InvariantTile, InvariantTile, InvariantTile]
    experts: ProductTiles  # of sorted pairs
    packed_int_experts: ProductTiles
    fp4_experts: ProductTiles
    # Attention of prompts, by bytes of a number of the query and of the cache, and whether it is batch-invariant: the
    # most that registers hold without spilling. See docs/performance.md.
    prefill: Mapping[tuple[int, int, bool], PrefillTiles]
    latent_prefill_stages: int  # two for the block table, three for rows: one tile of them is in flight
    scan_stages: int  # of the delta rule, 16 bits: tiles in shared memory, 120 KiB at a width of 128

    def prefill_tile(self, width: int, item_bytes: int, cache_item_bytes: int, *, batch_invariant: bool) -> PrefillTile:
        """The tile for heads of `width` numbers, a power of two."""
        column = min(bisect_left(HEAD_WIDTHS, width), len(HEAD_WIDTHS) - 1)
        return self.prefill[item_bytes, cache_item_bytes, batch_invariant][column]


def _by_rows(*outputs: int) -> ProductTiles:
    """Outputs of tiles of 16, 32, 64 and 128 rows. With few rows the time is that of reading the weight, which is
    fastest with many programs."""
    return {
        rows: ProductTile(size, 8, 3) if rows == 128 else ProductTile(size, 4, 4)
        for rows, size in zip((16, 32, 64, 128), outputs, strict=True)
    }


def _of_widths(*tiles: tuple[int, int, int]) -> PrefillTiles:
    first, second, third, last = (PrefillTile(*tile) for tile in tiles)
    return first, second, third, last


# A decode uses few rows of a batch-invariant tile and pays for all of them.
_PREFILL_FLOAT32 = _of_widths((32, 32, 4), (32, 32, 4), (32, 32, 4), (16, 16, 4))
_PREFILL = {
    (4, 4, False): _PREFILL_FLOAT32,
    (4, 4, True): _PREFILL_FLOAT32,
    (2, 2, False): _of_widths((128, 64, 8), (128, 64, 8), (128, 32, 8), (64, 16, 8)),
    (2, 2, True): _of_widths((64, 64, 4), (64, 64, 4), (64, 32, 8), (64, 16, 8)),
    # Keys and values of 8 bits are converted in registers.
    (4, 1, False): _PREFILL_FLOAT32,
    (4, 1, True): _PREFILL_FLOAT32,
    (2, 1, False): _of_widths((128, 64, 8), (128, 64, 8), (64, 32, 8), (64, 16, 8)),
    (2, 1, True): _of_widths((64, 32, 4), (64, 32, 4), (64, 32, 8), (64, 16, 8)),
}
_PREFILL_FLOAT32_IN_LITTLE = _of_widths((32, 32, 4), (32, 16, 4), (16, 16, 4), (16, 16, 4))
_HOPPER = Tilings(
    few_rows=(
        {
            16: FewRowsTile(64, 512, 3, 4),
            32: FewRowsTile(64, 512, 3, 4),
            64: FewRowsTile(64, 256, 4, 4),
            128: FewRowsTile(64, 256, 4, 4),
        },
        {16: FewRowsTile(128, 256, 3, 8), 32: FewRowsTile(128, 128, 4, 4), 64: FewRowsTile(128, 128, 4, 4)},
    ),
    router=RouterTile(weight_numbers=1 << 16, num_warps=8),
    fp8_blocks=_by_rows(32, 32, 128, 128),
    int8=_by_rows(32, 32, 128, 128),
    packed_ints=_by_rows(64, 64, 128, 128),
    fp4=_by_rows(64, 128, 128, 128),
    fp4_programs={16: 4, 32: 3, 64: 2, 128: 1},
    invariant=(InvariantTile(64, 32, 4), InvariantTile(64, 64, 6), InvariantTile(128, 64, 4)),
    experts=_by_rows(64, 64, 128, 128),
    packed_int_experts=_by_rows(64, 128, 128, 128),
    fp4_experts=_by_rows(64, 128, 128, 128),
    prefill=_PREFILL,
    latent_prefill_stages=5,
    scan_stages=3,
)
_OTHERS = replace(_HOPPER, few_rows=None, router=RouterTile(weight_numbers=0, num_warps=8))
# A program's four products a step, one for each run of 32 packed numbers, each have sums of their own in tensor memory:
# four columns a row with 64 outputs, eight with 128, of the 512 that all programs of a multiprocessor share.
_BLACKWELL = replace(
    _OTHERS,
    router=_HOPPER.router,
    packed_ints=_by_rows(64, 64, 64, 64),
    fp4=_by_rows(64, 64, 64, 64),
    packed_int_experts=_by_rows(64, 64, 64, 64),
    fp4_experts=_by_rows(64, 64, 64, 64),
)
# A program has at most 99 KiB of shared memory, as on an L4, an L40S or an RTX card; others have 163 or more. No tile
# of the latents' rows is in flight.
_LITTLE_SHARED_MEMORY = replace(
    _OTHERS,
    prefill=_PREFILL
    | {
        (4, 4, False): _PREFILL_FLOAT32_IN_LITTLE,
        (4, 4, True): _PREFILL_FLOAT32_IN_LITTLE,
        (2, 2, False): _of_widths((128, 64, 8), (128, 64, 8), (64, 16, 8), (32, 16, 4)),
        (2, 2, True): _of_widths((64, 64, 4), (64, 64, 4), (64, 16, 8), (32, 16, 4)),
    },
    latent_prefill_stages=4,
    scan_stages=1,
)
TILINGS = {  # by compute capability * 10
    90: _HOPPER,
    **dict.fromkeys((100, 103), _BLACKWELL),  # of data centres: those of 12.0 and 12.1 have no tensor memory
    **dict.fromkeys((86, 89, 120, 121), _LITTLE_SHARED_MEMORY),
}


def tilings_of(device: torch.device) -> Tilings:
    """The tiles for a GPU, or for the one that kernels of meta tensors are compiled for."""
    if device.type == "cuda":
        return _of_gpu(device)
    return _OTHERS if INTERPRETED else TILINGS.get(capability(device), _OTHERS)


@cache
def _of_gpu(device: torch.device) -> Tilings:
    return TILINGS.get(capability(device), _OTHERS)
