"""The adapters of one product in all slots: filled from host memory, and added to the product's outputs.

On a GPU, `SlotMatrices` and the kernels of `lora_matmul`. On a CPU, one product of a slot's tokens after another; as in
`linear`, a token's bits do not depend on the other tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from proa_engine.kernels.launch import next_power_of_2
from proa_engine.kernels.products.linear import Linear, Verdict, find_row_policy
from proa_engine.kernels.products.lora_matmul import (
    MIN_RANK,
    SlotMatrices,
    SlotTokens,
    add_lora,
    output_tiles,
    sort_tokens,
)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentMatrices:
    """An adapter's matrices for one segment of a product's outputs."""

    a: torch.Tensor  # [r, in_features]
    b: torch.Tensor  # [outputs of the segment, r]
    scale: float


Segments = Sequence[SegmentMatrices | None]  # None: the adapter has nothing for this segment


class TokenSlots:
    """Which tokens of the step that is computed have which slot; empty if none has one. Set before each step."""

    __slots__ = ("are_empty", "by_slot", "sorted")

    def __init__(self) -> None:
        self.are_empty = True
        self.sorted: SlotTokens | None = None  # on a GPU
        # On a CPU: slots and their tokens [n] int64; None: all tokens.
        self.by_slot: list[tuple[int, torch.Tensor | None]] = []

    def clear(self) -> None:
        self.are_empty, self.sorted, self.by_slot = True, None, []

    def set(self, slots: torch.Tensor, num_slots: int) -> None:
        """slots [T] int64, -1: none."""
        self.are_empty = False
        if not slots.is_cpu:
            self.sorted = sort_tokens(slots, num_slots)
            return
        values = slots.numpy()
        present = np.unique(values)
        if present.size == 1 and present[0] >= 0:
            self.by_slot = [(int(present[0]), None)]
            return
        self.by_slot = [(int(slot), torch.from_numpy(np.flatnonzero(values == slot))) for slot in present if slot >= 0]


class SlotAdapters(Protocol):
    """The adapters of one product, by slot."""

    def prepare(self, segments: Segments) -> object:
        """One adapter's matrices on the host, in the form that `fill` needs. From any thread."""
        ...

    def fill(self, slot: int, prepared: object) -> None:
        """Put an adapter into a slot; None: one that has nothing for this product."""
        ...

    def add(self, y: torch.Tensor, x: torch.Tensor, tokens: TokenSlots) -> None:
        """Add the outputs for x [T, in_features] to y [T, out_features]."""
        ...


@dataclass(frozen=True, slots=True)
class LoraShape:
    """The sizes of a product's adapters on this rank."""

    num_slots: int
    max_rank: int
    in_features: int
    segment_sizes: tuple[int, ...]  # outputs

    @property
    def rank(self) -> int:
        """That all adapters are padded to."""
        return max(MIN_RANK, next_power_of_2(self.max_rank))

    @property
    def num_parameters(self) -> int:
        """Number of values of one slot."""
        return self.rank * (len(self.segment_sizes) * self.in_features + sum(self.segment_sizes))


def make_slot_adapters(
    shape: LoraShape, dtype: torch.dtype, device: torch.device, *, batch_invariant: bool = False
) -> "SlotAdapters":
    if device.type == "cpu":
        return LoopedAdapters(shape, dtype)
    return FusedAdapters(shape, dtype, device, batch_invariant=batch_invariant)


class FusedAdapters:
    def __init__(
        self, shape: LoraShape, dtype: torch.dtype, device: torch.device, *, batch_invariant: bool = False
    ) -> None:
        self.shape = shape
        self.batch_invariant = batch_invariant
        slots, rank, num_segments = shape.num_slots, shape.rank, len(shape.segment_sizes)
        self.a = torch.zeros(slots, num_segments * rank, shape.in_features, dtype=dtype, device=device)
        self.b = torch.zeros(slots, sum(shape.segment_sizes), rank, dtype=dtype, device=device)
        self.scales = torch.zeros(slots, num_segments, device=device)
        self.tiles = output_tiles(shape.segment_sizes, device)

    def prepare(self, segments: Segments) -> SlotMatrices | None:
        """Matrices of one slot, page-locked so that copies of them do not block the host."""
        if not any(segments):
            return None
        shape, is_pinned = self.shape, self.a.is_cuda
        rank, num_segments = shape.rank, len(segments)
        a = torch.zeros(1, num_segments * rank, shape.in_features, dtype=self.a.dtype, pin_memory=is_pinned)
        b = torch.zeros(1, sum(shape.segment_sizes), rank, dtype=self.b.dtype, pin_memory=is_pinned)
        scales = torch.zeros(1, num_segments, pin_memory=is_pinned)
        end = 0
        for index, (segment, size) in enumerate(zip(segments, shape.segment_sizes, strict=True)):
            end += size
            if segment is not None:
                a[0, index * rank : index * rank + segment.a.shape[0]] = segment.a
                b[0, end - size : end, : segment.b.shape[1]] = segment.b
                scales[0, index] = segment.scale
        return SlotMatrices(a, b, scales, self.tiles)

    def fill(self, slot: int, prepared: object) -> None:
        if prepared is None:
            self.scales[slot].zero_()
            return
        assert isinstance(prepared, SlotMatrices)
        for target, source in ((self.a, prepared.a), (self.b, prepared.b), (self.scales, prepared.scales)):
            target[slot].copy_(source[0], non_blocking=True)

    def add(self, y: torch.Tensor, x: torch.Tensor, tokens: TokenSlots) -> None:
        assert tokens.sorted is not None
        matrices = SlotMatrices(self.a, self.b, self.scales, self.tiles)
        add_lora(y, x, matrices, tokens.sorted, batch_invariant=self.batch_invariant)


@dataclass(frozen=True, slots=True, eq=False)
class _LoopedAdapter:
    """Two products: by the A of all segments, and by one matrix with their B, each in its own rows and columns. Calls
    of products take longer than multiplying the zeros."""

    shrink: Linear  # [segments * rank, in_features]
    expand: Linear  # [out_features, segments * rank]


class LoopedAdapters:
    def __init__(self, shape: LoraShape, dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self.adapters: list[_LoopedAdapter | None] = [None] * shape.num_slots
        self.width = len(shape.segment_sizes) * shape.rank
        # Found now: to try row policies sets the number of threads of the whole process.
        self.shrink_verdict = self._verdict(self.width, shape.in_features)
        self.expand_verdict = self._verdict(sum(shape.segment_sizes), self.width)

    def _verdict(self, out_features: int, in_features: int) -> Verdict:
        return find_row_policy(out_features, in_features, False, self.dtype, torch.get_num_threads())

    def prepare(self, segments: Segments) -> _LoopedAdapter | None:
        if not any(segments):
            return None
        a = torch.zeros(self.width, self.shape.in_features, dtype=self.dtype)
        b = torch.zeros(sum(self.shape.segment_sizes), self.width, dtype=self.dtype)
        end = 0
        for index, (segment, size) in enumerate(zip(segments, self.shape.segment_sizes, strict=True)):
            end += size
            if segment is not None:
                column, rank = index * self.shape.rank, segment.a.shape[0]
                a[column : column + rank] = segment.a
                b[end - size : end, column : column + rank] = segment.b * segment.scale
        return _LoopedAdapter(Linear(a, verdict=self.shrink_verdict), Linear(b, verdict=self.expand_verdict))

    def fill(self, slot: int, prepared: object) -> None:
        assert prepared is None or isinstance(prepared, _LoopedAdapter)
        self.adapters[slot] = prepared

    def add(self, y: torch.Tensor, x: torch.Tensor, tokens: TokenSlots) -> None:
        for slot, rows in tokens.by_slot:
            adapter = self.adapters[slot]
            if adapter is None:
                continue
            if rows is None:
                y.add_(adapter.expand(adapter.shrink(x)))
            else:
                y.index_add_(0, rows, adapter.expand(adapter.shrink(x.index_select(0, rows))))
