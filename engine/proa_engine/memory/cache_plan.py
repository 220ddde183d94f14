"""Where each layer's cache is stored: tables of layers that share block ids, bytes of a block, and the memory itself.

All attention layers share one pool of blocks of equal bytes. A block of table 0 holds the tokens of all layers that
keep every token. Layers with a window are packed into further tables, each of as many layers as fit into a block.
The layers of cross-attention are in a table of their own, the last one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from proa_engine.layers.cache_layers import (
    CacheLayer,
    CrossLayer,
    KeyValueLayer,
    LatentLayer,
    LayerCache,
    SharedLayer,
    StateLayer,
)

_MAX_TABLES = 16  # each is one more block table of every request
_MIN_INTERVAL_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class Place:
    """A layer's position in the blocks of its table."""

    table: int
    offset: int  # bytes


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Where one rank stores each layer's cache. All ranks have the same tables; each rank stores its share of the heads
    of the layers of its pipeline stage."""

    block_size: int  # tokens
    block_bytes: int
    windows: tuple[int, ...]  # tokens, of the tables behind table 0
    places: tuple[Place | None, ...]  # by layer; None: a state
    state_bytes: int  # of one slot, all layers together
    checkpoint_interval: int  # tokens between checkpoints, the same on every pipeline stage
    cross_tokens: int = 0  # of the longest audio that cross-attention reads; 0: no layer does
    input_bytes: int = 0  # of the inputs of one token that layers with states keep if there are drafts

    @property
    def tables(self) -> tuple[int, ...]:
        """The table of each layer that reads blocks."""
        return tuple(place.table for place in self.places if place is not None)

    @property
    def tail_columns(self) -> tuple[int, ...]:
        """Most blocks that a checkpoint needs of each table with a window."""
        return _tail_columns(self.windows, self.block_size)


def plan_caches(
    layers: Sequence[CacheLayer], block_size: int, dtype: torch.dtype, max_model_len: int, own: range | None = None
) -> CachePlan:
    """Plan the caches of a model's `layers`, with keys, values and latent rows of type `dtype`.

    A window of `max_model_len` or more tokens is treated as full attention. If every layer has a window, all are in
    table 0, which keeps every token. Raises ValueError for latent rows in 8-bit floats.

    `own` are the indices of the layers of this rank's pipeline stage; None: all. The tables are those of the whole
    model. A stage divides its layers of a window evenly among that window's tables, so that no stage has most of a
    table. What the model keeps and a stage does not counts as 1 byte.
    """
    if dtype.itemsize == 1 and any(isinstance(layer, LatentLayer) for layer in layers):
        raise ValueError("kv_cache_dtype fp8 is not supported with latent attention; supported: auto")
    sizes = {index: _block_bytes(layer, block_size, dtype) for index, layer in enumerate(layers)}
    windows = {
        index: max(layer.window, 2)  # a window of 1 would leave a checkpoint without blocks
        for index, layer in enumerate(layers)
        if isinstance(layer, KeyValueLayer) and layer.window is not None and layer.window < max_model_len
    }
    cross = {index: layer for index, layer in enumerate(layers) if isinstance(layer, CrossLayer)}
    kept = [index for index, layer in enumerate(layers) if isinstance(layer, KeyValueLayer | LatentLayer)]
    full = [index for index in kept if index not in windows]
    if not full:
        full, windows = kept, {}
    tables = [full, *_pack(windows, sizes, sum(sizes[index] for index in full))]
    windows_of_tables = tuple(windows[indices[0]] for indices in tables[1:])
    states = [index for index, layer in enumerate(layers) if isinstance(layer, StateLayer)]
    if own is None:
        own = range(len(layers))
    if len(own) < len(layers):
        tables = [[index for index in full if index in own], *_divide(windows, windows_of_tables, own)]
    tables += [list(cross)] * bool(cross)
    placed = {
        index: Place(table, sum(sizes[before] for before in indices[:number]))
        for table, indices in enumerate(tables)
        for number, index in enumerate(indices)
    }
    widest = max(sum(sizes[index] for index in indices) for indices in tables)
    kept_here = [layers[index] for index in (*kept, *cross) if index in own]
    block_bytes = max(_round_up(widest, kept_here, block_size, dtype), min(len(kept), 1))
    state_bytes = max(sum(sizes[index] for index in states if index in own), min(len(states), 1))
    if len(own) < len(layers):
        interval = plan_caches(layers, block_size, dtype, max_model_len).checkpoint_interval
    else:
        interval = _checkpoint_interval(windows_of_tables, block_size, block_bytes, state_bytes)
    return CachePlan(
        block_size=block_size,
        block_bytes=block_bytes,
        windows=windows_of_tables,
        places=tuple(placed.get(_stored_by(layers, index)) for index in own),
        state_bytes=state_bytes,
        checkpoint_interval=interval,
        cross_tokens=max((layer.num_tokens for layer in cross.values()), default=0),
        input_bytes=sum(_input_bytes(layers[index]) for index in states if index in own),
    )


def _tail_columns(windows: Sequence[int], block_size: int) -> tuple[int, ...]:
    return tuple(-(-(window - 1) // block_size) for window in windows)


def _checkpoint_interval(windows: Sequence[int], block_size: int, block_bytes: int, state_bytes: int) -> int:
    """Return the least number of tokens, the shortest interval times a power of two, for which a checkpoint takes at
    most a quarter of the bytes of table 0 in that interval. A model that keeps no blocks has no bytes to compare with,
    and gets the shortest one."""
    interval = _MIN_INTERVAL_BLOCKS * block_size
    if not block_bytes:
        return interval
    checkpoint_bytes = sum(_tail_columns(windows, block_size)) * block_bytes + state_bytes
    while interval // block_size * block_bytes < 4 * checkpoint_bytes:
        interval *= 2
    return interval


def _divide(windows: Mapping[int, int], windows_of_tables: Sequence[int], own: range) -> list[list[int]]:
    """Divide one stage's layers with a window evenly among the tables of that window."""
    tables: list[list[int]] = []
    for window in sorted(set(windows_of_tables)):
        layers = [index for index, each in windows.items() if each == window and index in own]
        count = windows_of_tables.count(window)
        tables += [layers[number::count] for number in range(count)]
    return tables


def _pack(windows: Mapping[int, int], sizes: Mapping[int, int], block_bytes: int) -> list[list[int]]:
    """Divide layers with a window among tables: each table has as many layers of one window as fit into a block.

    A block is at least as large as the largest layer, and grows until there are at most `_MAX_TABLES` tables.
    """
    if not windows:
        return []
    largest = max(sizes[index] for index in windows)
    room = max(block_bytes, largest)
    while True:
        tables: list[list[int]] = []
        for window in sorted(set(windows.values())):
            tables.append([])
            for index in (index for index, own in windows.items() if own == window):
                if sum(sizes[each] for each in tables[-1]) + sizes[index] > room:
                    tables.append([])
                tables[-1].append(index)
        if len(tables) < _MAX_TABLES or room >= sum(sizes[index] for index in windows):
            return tables
        room += largest


def _round_up(num_bytes: int, layers: Sequence[CacheLayer], block_size: int, dtype: torch.dtype) -> int:
    """Round up to a multiple of the bytes of one head of each layer in a block: on a CPU, blocks are whole rows of
    heads."""
    rows = {_row_bytes(layer, block_size, dtype) for layer in layers}
    multiple = math.lcm(*rows)
    return -(-num_bytes // multiple) * multiple


def _row_bytes(layer: CacheLayer, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one head of a block, or of its latent rows."""
    match layer:
        case KeyValueLayer() | CrossLayer():
            return layer.head_dim * block_size * dtype.itemsize
        case LatentLayer():
            return _block_bytes(layer, block_size, dtype)
        case _:
            raise AssertionError(layer)


def _stored_by(layers: Sequence[CacheLayer], index: int) -> int:
    """Return the index of the layer that stores the cache which this layer reads."""
    layer = layers[index]
    return _stored_by(layers, layer.layer) if isinstance(layer, SharedLayer) else index


def _block_bytes(layer: CacheLayer, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block of the layer, or of one state."""
    match layer:
        case KeyValueLayer(num_kv_heads, head_dim) | CrossLayer(num_kv_heads, head_dim):
            return 2 * num_kv_heads * head_dim * block_size * dtype.itemsize
        case LatentLayer(rank, rope_dim, num_shares):
            return (rank + rope_dim) * (block_size // num_shares) * dtype.itemsize
        case StateLayer(parts):
            return sum(torch.Size(shape).numel() * part_dtype.itemsize for shape, part_dtype in parts)
        case SharedLayer():
            return 0


def _input_bytes(layer: CacheLayer) -> int:
    """Return the bytes of one token's inputs of a layer with a state."""
    assert isinstance(layer, StateLayer)
    return sum(width * dtype.itemsize for width, dtype in layer.inputs)


@dataclass(slots=True)
class CacheMemory:
    """The memory of a KV cache."""

    layers: list[LayerCache] = field(default_factory=list)  # of the model
    # [num_blocks, block_bytes] uint8; empty if layers have tensors of their own
    blocks: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    states: list[Tensor] = field(default_factory=list)  # parts of all layers' states, each [num_state_slots, *shape]
    drafter_layers: list[LayerCache] = field(default_factory=list)

    def divide(self, num_layers: int) -> None:
        """Count the layers behind the first `num_layers` as the drafter's."""
        self.drafter_layers += self.layers[num_layers:]
        del self.layers[num_layers:]

    def free(self) -> None:
        """Drop the memory. What a step still uses is freed when the step ends."""
        self.layers.clear()
        self.drafter_layers.clear()
        self.states.clear()
        self.blocks = torch.empty(0, dtype=torch.uint8)


def allocate_caches(
    layers: Sequence[CacheLayer],
    plan: CachePlan,
    num_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
    num_state_slots: int = 0,
    *,
    kept_tokens: tuple[int, int] = (0, 0),
    whole_blocks: bool = False,
) -> CacheMemory:
    """Allocate every layer's cache. Values are not initialized, because only positions that were written are read.

    `kept_tokens`: of how many requests, and of how many tokens of each, layers with states keep inputs.

    If all attention layers have one shape, each place in a block is a tensor of its own, which one layer of every table
    uses. Otherwise, and with `whole_blocks`, layers are strided views of one tensor of bytes. On a CPU unused pages
    stay untouched.
    """
    in_blocks = [layer for layer in layers if isinstance(layer, KeyValueLayer | CrossLayer | LatentLayer)]
    shapes = {_shape(layer, plan.block_size) for layer in in_blocks}
    is_divided = len(shapes) == 1 and not whole_blocks
    memory = _Lanes(num_blocks, dtype, device) if is_divided else _Bytes(num_blocks, plan, dtype, device)
    caches, states = list[LayerCache](), list[Tensor]()
    for layer, place in zip(layers, plan.places, strict=True):
        match layer:
            case KeyValueLayer() | CrossLayer() | LatentLayer():
                assert place is not None
                block = memory.view(place.offset, _shape(layer, plan.block_size))
                tensors = (block,) if isinstance(layer, LatentLayer) else block.unbind(1)
                caches.append(LayerCache(place.table, tensors))
            case SharedLayer(stored_by):
                caches.append(caches[stored_by])
            case StateLayer(parts):
                own = [torch.empty(num_state_slots, *shape, dtype=each, device=device) for shape, each in parts]
                kept = [torch.empty(*kept_tokens, width, dtype=each, device=device) for width, each in layer.inputs]
                caches.append(LayerCache(0, tuple(own), tuple(kept)))
                states += own
    return CacheMemory(caches, memory.bytes, states)


def _shape(layer: KeyValueLayer | CrossLayer | LatentLayer, block_size: int) -> tuple[int, ...]:
    """The shape of one block of the layer."""
    if isinstance(layer, LatentLayer):
        return block_size // layer.num_shares, layer.rank + layer.rope_dim
    return 2, layer.num_kv_heads, block_size, layer.head_dim


class _Lanes:
    """Memory of attention layers of one shape: a tensor for each offset into a block."""

    def __init__(self, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self._num_blocks, self._dtype, self._device = num_blocks, dtype, device
        self._lanes: dict[int, Tensor] = {}
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device)  # none in common

    def view(self, offset: int, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor [num_blocks, *shape]. It has all keys before all values, so that each block's keys are
        contiguous."""
        lane = self._lanes.get(offset)
        if lane is None:
            sizes = (shape[0], self._num_blocks, *shape[1:]) if len(shape) == 4 else (self._num_blocks, *shape)
            lane = self._lanes[offset] = torch.empty(sizes, dtype=self._dtype, device=self._device)
        return lane.transpose(0, 1) if len(shape) == 4 else lane


class _Bytes:
    """Memory of attention layers of several shapes: one tensor of bytes."""

    def __init__(self, num_blocks: int, plan: CachePlan, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self.bytes = torch.empty(num_blocks, plan.block_bytes, dtype=torch.uint8, device=device)

    def view(self, offset: int, shape: tuple[int, ...]) -> Tensor:
        """Return the view [num_blocks, *shape], whose first stride is a block."""
        num_bytes = torch.Size(shape).numel() * self._dtype.itemsize
        return self.bytes[:, offset : offset + num_bytes].view(self._dtype).view(-1, *shape)
