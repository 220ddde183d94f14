"""Causal paged attention of prompts on Hopper: which tiling the kernel takes, what it suits, and its launch.

It is for 16-bit caches with heads of 64 or 128 numbers; everything else, and all prompts on other GPUs, Blackwell's
too, is computed by `prefill_attention`: wgmma, which this kernel is written with, exists on Hopper alone. The other
kernel's tensor cores wait for each softmax: on an H200 it reached 360 TFLOP/s for a prompt of 8,192 tokens of
Llama-3.1-8B, this one (`prefill_hopper_kernel`) 579, and torch's cuDNN attention, which reads no block tables, 609.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from proa_engine.kernels.attention.attention_tile import LOG2_E
from proa_engine.kernels.attention.prefill_hopper_kernel import PART, prefill_hopper_kernel
from proa_engine.kernels.attention.store_kv import block_stride, rows_view
from proa_engine.kernels.launch import HOPPER_MULTIPROCESSORS
from proa_engine.kernels.tensor_map import Memory, TensorMap

BLOCK_SIZES = (16, 32, 64)
HEAD_DIMS = (64, 128)

_CONSUMER_ROWS = 64


class Tiling(NamedTuple):
    consumers: int
    tile: int  # tokens
    stages: int
    options: dict[str, int]  # of the launch

    @property
    def rows(self) -> int:
        return self.consumers * _CONSUMER_ROWS


# One program a multiprocessor, of 216 KiB of shared memory, for long prompts; two of them for short ones.
LONG = Tiling(consumers=2, tile=128, stages=3, options={})
SHORT = Tiling(consumers=1, tile=64, stages=2, options={"maxnreg": 128})


def choose_tiling(num_tokens: float, num_heads: int, head_dim: int, window: int | None) -> Tiling:
    """The faster tiling for prompts of `num_tokens` tokens on average.

    A tile of LONG takes less time for each token that is attended to, a program of SHORT less time to begin and end. On
    an H200 they are equally fast where a token attends to 1,050 others on average with heads of 128 numbers, and to
    1,980 with 64. Tokens before the prompts' are not counted: the host does not know them where steps are captured.

    LONG is chosen for a prompt of any length only if it is for the longest: an engine starts with that.
    """
    attended = num_tokens / 2 if window is None else min(num_tokens / 2, window)
    fills = num_tokens * num_heads >= HOPPER_MULTIPROCESSORS * LONG.rows
    return LONG if attended * head_dim >= 1 << 17 and fills else SHORT


def prefill_hopper(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    num_decodes: int,
    scale: float,
    window: int | None,
    *,
    sinks: torch.Tensor | None = None,
) -> None:
    """Write out [T, heads, D] for query [T, heads, D] of all requests behind the first `num_decodes`.

    A request's tokens before its beginning are padding and get zeros.
    """
    num_tokens, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    group = num_heads // num_kv_heads
    assert query.stride(-1) == 1
    assert out.is_contiguous()
    num_requests = seq_lens.shape[0] - num_decodes
    tiling = choose_tiling((num_tokens - num_decodes) / num_requests, num_heads, head_dim, window)
    block_q = tiling.rows // group
    prefill_hopper_kernel[((num_tokens // block_q + num_requests) * num_kv_heads,)](
        query,
        _rows_map(key_cache),
        _rows_map(value_cache),
        out,
        query_start_loc,
        seq_lens,
        block_table,
        sinks,
        num_decodes,
        num_requests,
        scale * LOG2_E,
        query.stride(0),
        query.stride(1),
        block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        ROWS_PER_BLOCK=block_stride(key_cache, value_cache) // head_dim,
        BLOCK_Q=block_q,
        TILE=tiling.tile,
        STAGES=tiling.stages,
        CONSUMERS=tiling.consumers,
        D=head_dim,
        WINDOW=window or 0,
        num_warps=4,
        **tiling.options,
    )


def suits(query: torch.Tensor, key_cache: torch.Tensor) -> bool:
    """Whether the kernel computes such queries and caches. It takes any window and sinks."""
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    return (
        query.dtype == key_cache.dtype
        and query.dtype in (torch.bfloat16, torch.float16)
        and head_dim in HEAD_DIMS
        and block_size in BLOCK_SIZES
        and query.shape[1] // num_kv_heads <= SHORT.rows
        and key_cache.stride(0) % head_dim == 0
    )


def _rows_map(cache: torch.Tensor) -> TensorMap:
    (num_rows, head_dim), _ = rows_view(cache.shape, cache.stride(0), cache.shape[-1])
    return _map_of(Memory(cache.data_ptr(), cache.dtype), num_rows, head_dim, cache.shape[2])


@lru_cache(maxsize=2048)
def _map_of(memory: Memory, num_rows: int, head_dim: int, block_size: int) -> TensorMap:
    """The rows of a cache, copied by the half block or, with heads of 64 numbers, by the block."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorMap(TensorDescriptor(memory, [num_rows, head_dim], [head_dim, 1], [block_size, PART], layout))
