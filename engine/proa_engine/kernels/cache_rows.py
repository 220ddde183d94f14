"""KV cache slots of a step's tokens as row indices, for the CPU."""

from dataclasses import dataclass

import torch

from proa_engine.kernels.cache_layout import RowsView, rows_view


@dataclass(frozen=True, slots=True)
class CacheRows:
    """The slots of a step's tokens: computed once a step, used by every layer."""

    rows: torch.Tensor  # [tokens * kv_heads] int64: rows of `view`
    tokens: torch.Tensor | None  # int64: the tokens that are not padding; None: all
    view: RowsView  # of a cache, rows of D


def cache_rows(slot_mapping: torch.Tensor, cache_shape: torch.Size, block_stride: int | None = None) -> CacheRows:
    """Convert slots [T] int64 to row indices. `cache_shape`: that of the keys, [num_blocks, kv_heads, block_size, D].
    `block_stride`, a multiple of D: elements from one block to the next; None: the cache is contiguous."""
    _, num_heads, block_size, head_dim = cache_shape
    rows_per_block = num_heads * block_size if block_stride is None else block_stride // head_dim
    tokens = None
    if bool((slot_mapping < 0).any()):
        tokens = (slot_mapping >= 0).nonzero().flatten()
        slot_mapping = slot_mapping[tokens]
    block = slot_mapping.div(block_size, rounding_mode="floor")
    first = block * (rows_per_block - block_size) + slot_mapping
    rows = first[:, None] + torch.arange(0, num_heads * block_size, block_size)
    return CacheRows(rows.flatten(), tokens, rows_view(cache_shape, block_stride, head_dim))


def write_to_cache(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, rows: CacheRows
) -> None:
    """Write key and value [T, kv_heads, D] to their caches [num_blocks, kv_heads, block_size, D], in place."""
    if rows.tokens is not None:
        key, value = key[rows.tokens], value[rows.tokens]
    if key_cache.itemsize == 1:  # torch cannot copy rows of 8-bit floats; it copies bytes
        key, value, key_cache, value_cache = (each.view(torch.uint8) for each in (key, value, key_cache, value_cache))
    head_dim = key.shape[-1]
    key_cache.as_strided(*rows.view).index_copy_(0, rows.rows, key.reshape(-1, head_dim))
    value_cache.as_strided(*rows.view).index_copy_(0, rows.rows, value.reshape(-1, head_dim))
