"""Where each layer's cache lies in memory: bytes of a block and the tensors, from what the layers declare."""

from collections.abc import Sequence

import torch

from proa_engine.layers.cache_layers import CacheLayer, KeyValueLayer, LatentLayer, LayerCache, SharedLayer, StateLayer


def block_bytes(layers: Sequence[CacheLayer], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block of `block_size` tokens of all layers together."""
    return sum(_token_values(layer) for layer in layers) * block_size * dtype.itemsize


def allocate_caches(
    layers: Sequence[CacheLayer], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[LayerCache]:
    """Allocate every layer's cache, without setting its values: only positions that tokens were written to are read.

    On a CPU unused pages stay untouched.
    """
    caches: list[LayerCache] = []
    for layer in layers:
        match layer:
            case KeyValueLayer(num_kv_heads, head_dim):
                shape = (2, num_blocks, num_kv_heads, block_size, head_dim)
                caches.append(LayerCache(0, torch.empty(shape, dtype=dtype, device=device).unbind()))
            case LatentLayer(rank, rope_dim):
                rows = torch.empty(num_blocks, block_size, rank + rope_dim, dtype=dtype, device=device)
                caches.append(LayerCache(0, (rows,)))
            case SharedLayer(shared):
                caches.append(caches[shared])
            case StateLayer():
                raise ValueError("layers with a recurrent state are not supported")
    return caches


def _token_values(layer: CacheLayer) -> int:
    """Values that the layer keeps for each token."""
    match layer:
        case KeyValueLayer(num_kv_heads, head_dim):
            return 2 * num_kv_heads * head_dim
        case LatentLayer(rank, rope_dim):
            return rank + rope_dim
        case SharedLayer() | StateLayer():
            return 0
