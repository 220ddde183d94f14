"""Memory layout of KV caches: blocks, which are contiguous, at equal distances."""

import torch

# Arguments of `as_strided` that view a cache as rows of its memory, whatever is between its blocks: shape and strides.
RowsView = tuple[tuple[int, int], tuple[int, int]]


def block_stride(key_cache: torch.Tensor, value_cache: torch.Tensor) -> int:
    """Return the elements from one block to the next, the same in both caches [num_blocks, kv_heads, block_size, D]."""
    stride, *inner = key_cache.stride()
    _, _, block_size, head_dim = key_cache.shape
    assert inner == [block_size * head_dim, head_dim, 1]
    assert value_cache.stride() == key_cache.stride()
    return stride


def rows_view(cache_shape: torch.Size, block_stride: int | None, width: int) -> RowsView:
    """The rows of `width` elements of a cache [num_blocks, kv_heads, block_size, D], from its beginning to its end.

    `block_stride`: elements from one block to the next; None: the cache is contiguous. `width` divides it, and is D or
    block_size * D.
    """
    size = cache_shape[1:].numel()
    stride = size if block_stride is None else block_stride
    assert stride % width == 0
    end = (cache_shape[0] - 1) * stride + size if size else 0  # without KV heads there are no rows
    return (end // width, width), (width, 1)
