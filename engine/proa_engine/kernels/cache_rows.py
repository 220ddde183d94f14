"""KV cache slots of a step's tokens as row indices, for the CPU."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class CacheRows:
    """The slots of a step's tokens: computed once a step, used by every layer."""

    rows: torch.Tensor  # [tokens * kv_heads] int64: rows of a cache seen as [num_blocks * kv_heads * block_size, D]
    tokens: torch.Tensor | None  # int64: the tokens that are not padding; None: all


def cache_rows(slot_mapping: torch.Tensor, cache_shape: torch.Size) -> CacheRows:
    """Convert slots [T] int64 to row indices. `cache_shape`: that of the keys, [num_blocks, kv_heads, block_size,
    D]."""
    _, num_heads, block_size, _ = cache_shape
    tokens = None
    if bool((slot_mapping < 0).any()):
        tokens = (slot_mapping >= 0).nonzero().flatten()
        slot_mapping = slot_mapping[tokens]
    block = slot_mapping.div(block_size, rounding_mode="floor")
    first = block * (num_heads - 1) * block_size + slot_mapping
    rows = first[:, None] + torch.arange(0, num_heads * block_size, block_size)
    return CacheRows(rows.flatten(), tokens)


def write_to_cache(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, rows: CacheRows
) -> None:
    """Write key and value [T, kv_heads, D] to their caches [num_blocks, kv_heads, block_size, D], in place."""
    if rows.tokens is not None:
        key, value = key[rows.tokens], value[rows.tokens]
    if key_cache.itemsize == 1:  # torch cannot copy rows of 8-bit floats; it copies bytes
        key, value, key_cache, value_cache = (each.view(torch.uint8) for each in (key, value, key_cache, value_cache))
    head_dim = key.shape[-1]
    key_cache.view(-1, head_dim).index_copy_(0, rows.rows, key.reshape(-1, head_dim))
    value_cache.view(-1, head_dim).index_copy_(0, rows.rows, value.reshape(-1, head_dim))
