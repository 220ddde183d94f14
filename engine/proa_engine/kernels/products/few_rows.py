"""Products of few rows, y = x @ weight.T + bias: of up to some hundred, which take as long as reading the weight.

The weight's rows lie on the side of the tensor cores' instructions that has at least 64 rows, and x on the other, so a
few rows take little arithmetic. A program computes a tile of BLOCK_N outputs, or a part of it (`product_tile`).
bfloat16 and float16, or 8-bit floats with a scale for each row of x and each output.

A kernel that starts before the previous one has ended reads the beginning of its part of the weight into the L2 cache
meanwhile. 256 bytes of each row are best; 512 and more are slower.

`few_rows_tiling` says which products take this kernel: those in which it was faster than cuBLAS on an H200
(`PYTHONPATH=tests python -m benchmarks.kernels.few_rows`). The products and norms of a layer of the 8B model, without
attention, with the best tiling of each product, in us:

    rows             4     16     32     64    128    256
    fp8          71.7   72.4   75.2   81.1   95.4  124.6
      cuBLAS    110.5  111.2  111.0  110.1  113.4  134.1
    bf16        118.0  118.9  123.2  129.9  147.2  231.8
      cuBLAS    125.1  127.1  131.9  137.0  144.5  191.9

Other GPUs than Hopper leave all of these products to cuBLAS, because no tiles were measured there (`Tilings.few_rows`).
With more rows cuBLAS is faster: it loads x once for several multiprocessors (TMA multicast), which Triton 3.6 cannot.
The sums depend on the number of rows, so batch-invariant products do not take this kernel. Those of 8-bit floats have
fewer bits, as cuBLAS's quick ones have; float16 models, whose products of more rows have all bits, lose some. Simulated
with every 32 products added to 14 bits, as Hopper's tensor cores do (DeepSeek-V3, arXiv:2412.19437), the sums of 14,336
random products are 0.3 % off (root mean square), beside 4.0 % by the quantization of rows and weight: 4.0 % together.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
import triton.language as tl

from proa_engine.kernels.fp8 import FP8, QuantizedRows, dequantize_rows
from proa_engine.kernels.launch import cdiv, kernel, num_multiprocessors
from proa_engine.kernels.prefetch import prefetch
from proa_engine.kernels.products.product_tile import add_parts, new_counters, rows_per_program, store_part, store_tile
from proa_engine.kernels.silu_and_mul import activate_and_mul_reference
from proa_engine.kernels.tilings import FewRowsTile, FewRowsTiles, tilings_of

MAX_ROWS = {1: 256, 2: 64}  # by the bytes of a number of the weight
FEWEST_OUTPUTS = 1024  # of the products that were measured
MULTIPLE = 16  # of the inputs, so that rows of the weight are aligned
MOST_PARTS = 4  # of a tile
UNDIVIDED_BYTES = 2048  # rows of a weight that take as long to read as parts to add
PREFETCH_BYTES = 256  # of each row of a program's part of the weight
SUM_REGISTERS = 128  # of a thread, for the parts that it loads at a time


@dataclass(frozen=True, slots=True)
class Tiling:
    block_m: int  # rows of x
    block_n: int  # rows of the weight
    block_k: int
    num_parts: int  # programs that share a tile
    num_warps: int
    num_stages: int
    prefetch_bytes: int = PREFETCH_BYTES

    @classmethod
    def of(cls, tile: FewRowsTile, block_m: int, item_bytes: int, num_parts: int = 1) -> Self:
        block_k = tile.input_bytes // item_bytes
        return cls(block_m, tile.outputs, block_k, num_parts, tile.num_warps, tile.num_stages)


def few_rows_tiling(
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    item_bytes: int,
    multiprocessors: int,
    tiles_of_rows: tuple[FewRowsTiles, FewRowsTiles],
) -> Tiling | None:
    """The tiling of a product by a weight [num_outputs, num_inputs]; None: cuBLAS is faster, or must be taken.

    `tiles_of_rows`: `Tilings.few_rows`.
    """
    if not 0 < num_rows <= MAX_ROWS.get(item_bytes, 0) or num_outputs < FEWEST_OUTPUTS or num_inputs % MULTIPLE:
        return None
    block_m, (narrow, wide) = rows_per_program(num_rows), tiles_of_rows
    tile = narrow[block_m]
    tiles = cdiv(num_rows, block_m) * cdiv(num_outputs, tile.outputs)
    if tiles > multiprocessors:
        return Tiling.of(wide[block_m], block_m, item_bytes) if block_m in wide else None
    num_parts = 1
    if num_inputs * item_bytes > UNDIVIDED_BYTES:
        num_blocks = cdiv(num_inputs * item_bytes, tile.input_bytes)
        num_parts = max(min(multiprocessors // tiles, num_blocks // 3, MOST_PARTS), 1)
    return Tiling.of(tile, block_m, item_bytes, num_parts)


class FewRowsLinear:
    """Products of few rows by a weight [N, K] on a GPU, 8-bit floats with scales [N] float32 or numbers of 16 bits."""

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        self.weight, self.scales, self.bias = weight, scales, bias
        self.arrived = new_counters(weight.device)
        self.multiprocessors = num_multiprocessors(weight.device)
        is_aligned = not weight.is_cpu and weight.is_contiguous() and weight.data_ptr() % MULTIPLE == 0
        self.fits = is_aligned and weight.dtype in (torch.bfloat16, torch.float16, FP8)

    @cached_property
    def tiles_of_rows(self) -> tuple[FewRowsTiles, FewRowsTiles] | None:
        return tilings_of(self.weight.device).few_rows

    def tiling(self, num_rows: int) -> Tiling | None:
        """The tiling of so many rows. None: not by this kernel."""
        num_outputs, num_inputs = self.weight.shape
        item_bytes = self.weight.element_size()
        if not self.fits or num_rows > MAX_ROWS[item_bytes] or not self.tiles_of_rows:
            return None
        return few_rows_tiling(num_rows, num_outputs, num_inputs, item_bytes, self.multiprocessors, self.tiles_of_rows)

    def __call__(self, x: torch.Tensor | QuantizedRows, tiling: Tiling, *, gated: bool = False) -> torch.Tensor:
        return few_rows_linear(x, self.weight, self.scales, self.bias, self.arrived, tiling, gated=gated)


def few_rows_linear(
    x: torch.Tensor | QuantizedRows,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    arrived: torch.Tensor,
    tiling: Tiling,
    *,
    gated: bool = False,
) -> torch.Tensor:
    """x [T, K], weight [N, K] -> [T, N] in the rows' type; `gated`: silu(gate) * up of [gate | up], [T, N / 2].

    `scales` [N] float32: of a weight of 8-bit floats. `arrived`: of `new_counters`, zeros before and after, for one
    product at a time. GPU only. The kernel may read the weight before the previous kernel has ended.
    """
    rows = x.values if isinstance(x, QuantizedRows) else x
    num_rows, num_inputs = rows.shape
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    assert rows.stride(1) == 1
    assert weight.is_contiguous()
    assert isinstance(x, QuantizedRows) == (scales is not None)
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=weight.device)
    tiles = cdiv(num_rows, tiling.block_m) * cdiv(weight.shape[0], tiling.block_n)
    num_blocks = cdiv(num_inputs, tiling.block_k)
    part_blocks = cdiv(num_blocks, tiling.num_parts)
    num_parts = cdiv(num_blocks, part_blocks)
    parts = None
    if num_parts > 1:
        assert tiles <= arrived.numel()
        shape = (num_parts, tiles, tiling.block_n, tiling.block_m)
        parts = torch.empty(shape, dtype=torch.float32, device=weight.device)
    few_rows_kernel[tiles, num_parts](
        rows,
        x.scales if isinstance(x, QuantizedRows) else None,
        weight,
        scales,
        bias,
        out,
        parts,
        None if parts is None else arrived,
        num_rows,
        num_outputs,
        num_inputs,
        rows.stride(0),
        part_blocks,
        tiling.prefetch_bytes // weight.element_size(),
        HAS_SCALES=scales is not None,
        HAS_BIAS=bias is not None,
        GATED=gated,
        IN_PARTS=parts is not None,
        WHOLE_BLOCKS=num_inputs % tiling.block_k == 0,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        UNROLL=min(max(SUM_REGISTERS * 32 * tiling.num_warps // (tiling.block_m * tiling.block_n), 1), MOST_PARTS),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return out


def few_rows_linear_reference(
    x: torch.Tensor | QuantizedRows,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    gated: bool = False,
) -> torch.Tensor:
    rows = dequantize_rows(x) if isinstance(x, QuantizedRows) else x.float()
    dense = weight.float() if scales is None else weight.float() * scales[:, None]
    y = torch.nn.functional.linear(rows, dense, None if bias is None else bias.float())
    return (activate_and_mul_reference(y, "silu") if gated else y).to(x.dtype)


@kernel(do_not_specialize=["num_rows", "part_blocks", "prefetch_inputs"])
def few_rows_kernel(
    x_ptr,  # [num_rows, num_inputs]
    x_scales_ptr,  # [num_rows], or nothing
    weight_ptr,  # [num_outputs, num_inputs], or [2 * num_outputs, num_inputs] if GATED
    scales_ptr,  # as the weight's rows, or nothing
    bias_ptr,  # as the weight's rows, or nothing
    out_ptr,  # [num_rows, num_outputs]
    parts_ptr,  # [num_parts, tiles, BLOCK_N, BLOCK_M] float32, or nothing
    arrived_ptr,  # [tiles]: parts that are stored, or nothing
    num_rows,
    num_outputs,
    num_inputs,
    stride_x_row,
    part_blocks,  # of BLOCK_K inputs
    prefetch_inputs,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    IN_PARTS: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr,  # num_inputs is a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,  # parts that are loaded at a time
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tile_n = tile // tiles_m
    row = (tile % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    row_mask = row < num_rows
    turn = tl.arange(0, BLOCK_N)
    # Tiles past the end compute the last output again, without masks.
    if GATED:  # the rows of gate and up alternate
        weight_row = tl.minimum(tile_n * (BLOCK_N // 2) + turn // 2, num_outputs - 1) + turn % 2 * num_outputs
        column = tile_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        weight_row = tl.minimum(tile_n * BLOCK_N + turn, num_outputs - 1)
        column = tile_n * BLOCK_N + turn
    weight_row_ptr = weight_ptr + weight_row.to(tl.int64) * num_inputs
    num_blocks = tl.cdiv(num_inputs, BLOCK_K)
    first_block = tl.program_id(1) * part_blocks
    end_block = tl.minimum(first_block + part_blocks, num_blocks)
    if PDL:
        if prefetch_inputs > 0:
            first_input = first_block * BLOCK_K
            end_input = tl.minimum(first_input + tl.minimum(prefetch_inputs, part_blocks * BLOCK_K), num_inputs)
            prefetch(weight_row_ptr + first_input, end_input - first_input)
        tl.extra.cuda.gdc_wait()

    inner = tl.arange(0, BLOCK_K)
    weight_place = weight_row_ptr[:, None] + inner[None, :]
    x_place = x_ptr + row[None, :] * stride_x_row + inner[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in range(first_block, end_block):
        start = block * BLOCK_K
        if WHOLE_BLOCKS:
            weight = tl.load(weight_place + start, eviction_policy="evict_first")
            x = tl.load(x_place + start, mask=row_mask[None, :], other=0.0)
        else:
            inner_mask = start + inner < num_inputs
            weight = tl.load(weight_place + start, mask=inner_mask[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_place + start, mask=row_mask[None, :] & inner_mask[:, None], other=0.0)
        total = tl.dot(weight, x, total)

    if IN_PARTS:
        num_parts = tl.num_programs(1)
        size = tl.num_programs(0) * BLOCK_N * BLOCK_M
        place = parts_ptr + (tile * BLOCK_N + turn[:, None]) * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        if not store_part(total, place + tl.program_id(1) * size, None, arrived_ptr + tile, num_parts):
            return
        total = add_parts(place, None, size, arrived_ptr + tile, num_parts, UNROLL)
    if HAS_SCALES:
        total *= tl.load(scales_ptr + weight_row)[:, None]
        total *= tl.load(x_scales_ptr + row, mask=row_mask, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + weight_row).to(tl.float32)[:, None]
    y = tl.trans(total)
    if GATED:
        gate, up = tl.split(tl.reshape(y, (BLOCK_M, BLOCK_N // 2, 2)))
        y = gate / (1.0 + tl.exp(-gate)) * up
    store_tile(out_ptr, y, None, row, column, num_rows, num_outputs, False)
