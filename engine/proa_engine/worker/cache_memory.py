"""Allocate the memory of a `CachePlan` and give each layer its tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from proa_engine.layers.cache_layers import CacheLayer, KeyValueLayer, LatentLayer, LayerCache, SharedLayer, StateLayer
from proa_engine.worker.cache_plan import CachePlan


def allocate_caches(
    layers: Sequence[CacheLayer],
    plan: CachePlan,
    num_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
    num_state_slots: int = 0,
) -> list[LayerCache]:
    """Allocate every layer's cache, without setting its values: only positions that tokens were written to are read.

    Where all attention layers have one shape, each place in a block is a tensor of its own, which one layer of every
    table uses. Otherwise layers are views of one tensor of bytes, whose blocks are strided. On a CPU unused pages stay
    untouched.
    """
    shapes = {_shape(layer, plan.block_size) for layer in layers if isinstance(layer, KeyValueLayer | LatentLayer)}
    memory = _Lanes(num_blocks, dtype, device) if len(shapes) == 1 else _Bytes(num_blocks, plan, dtype, device)
    caches: list[LayerCache] = []
    for layer, place in zip(layers, plan.places, strict=True):
        match layer:
            case KeyValueLayer() | LatentLayer():
                assert place is not None
                block = memory.view(place.offset, _shape(layer, plan.block_size))
                tensors = block.unbind(1) if isinstance(layer, KeyValueLayer) else (block,)
                caches.append(LayerCache(place.table, tensors))
            case SharedLayer(stored_by):
                caches.append(caches[stored_by])
            case StateLayer(parts):
                states = (torch.empty(num_state_slots, *shape, dtype=each, device=device) for shape, each in parts)
                caches.append(LayerCache(0, tuple(states)))
    return caches


def _shape(layer: KeyValueLayer | LatentLayer, block_size: int) -> tuple[int, ...]:
    """One block of the layer."""
    if isinstance(layer, LatentLayer):
        return block_size, layer.rank + layer.rope_dim
    return 2, layer.num_kv_heads, block_size, layer.head_dim


class _Lanes:
    """A tensor for each offset into a block."""

    def __init__(self, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self._num_blocks, self._dtype, self._device = num_blocks, dtype, device
        self._lanes: dict[int, Tensor] = {}

    def view(self, offset: int, shape: tuple[int, ...]) -> Tensor:
        """[num_blocks, *shape]. Keys lie before all values, so that a block of each is contiguous among its like."""
        lane = self._lanes.get(offset)
        if lane is None:
            sizes = (shape[0], self._num_blocks, *shape[1:]) if len(shape) == 4 else (self._num_blocks, *shape)
            lane = self._lanes[offset] = torch.empty(sizes, dtype=self._dtype, device=self._device)
        return lane.transpose(0, 1) if len(shape) == 4 else lane


class _Bytes:
    """One tensor of bytes for all layers."""

    def __init__(self, num_blocks: int, plan: CachePlan, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._bytes = torch.empty(num_blocks, plan.block_bytes, dtype=torch.uint8, device=device)

    def view(self, offset: int, shape: tuple[int, ...]) -> Tensor:
        """[num_blocks, *shape], strided by blocks."""
        num_bytes = torch.Size(shape).numel() * self._dtype.itemsize
        return self._bytes[:, offset : offset + num_bytes].view(self._dtype).view(-1, *shape)
