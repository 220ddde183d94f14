"""Memory layout of KV caches: blocks, which are contiguous, at equal distances."""

import torch


def block_stride(key_cache: torch.Tensor, value_cache: torch.Tensor) -> int:
    """Return the elements from one block to the next, the same in both caches [num_blocks, kv_heads, block_size, D]."""
    stride, *inner = key_cache.stride()
    _, _, block_size, head_dim = key_cache.shape
    assert inner == [block_size * head_dim, head_dim, 1]
    assert value_cache.stride() == key_cache.stride()
    return stride


def cache_as_rows(cache: torch.Tensor, width: int) -> torch.Tensor:
    """View a cache [num_blocks, kv_heads, block_size, D] as rows [rows, width] of the memory from its beginning to its
    end, whatever is between its blocks. `width` divides the distance of blocks, and is D or block_size * D."""
    if cache.is_contiguous():
        return cache.view(-1, width)
    stride, size = cache.stride(0), cache.shape[1:].numel()
    assert stride % width == 0
    return cache.as_strided((((len(cache) - 1) * stride + size) // width, width), (width, 1))
