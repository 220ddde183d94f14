"""Staging: copy one step's host arrays to the device in a single transfer; DraftCopy: copy draft tokens to the host.

All staged arrays are int64, so that one buffer holds them; floats are stored as the bits of float64. An array is
identified by its staged index: its place in the order of `Packer.add`.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proa_engine.kernels.sampling.drafts import NONE

IntArray = npt.NDArray[np.int64]
_Read = Callable[[], list[list[int]]]


@dataclass(frozen=True, slots=True)
class PackedArrays:
    """Concatenated arrays, and their lengths."""

    values: IntArray
    lengths: list[int]


class Packer:
    """Collects a step's arrays. `add` returns an array's staged index: its index in what `Staging.ship` returns."""

    def __init__(self, first: PackedArrays | None = None) -> None:
        self._parts: list[IntArray] = [] if first is None else [first.values]
        self._lengths: list[int] = [] if first is None else [*first.lengths]
        self.num_arrays = len(self._lengths)

    def add(self, array: IntArray) -> int:
        self._parts.append(array)
        self._lengths.append(array.size)
        self.num_arrays += 1
        return self.num_arrays - 1

    def add_floats(self, array: npt.NDArray[np.float64]) -> int:
        return self.add(np.ascontiguousarray(array).reshape(-1).view(np.int64))

    def pack(self) -> PackedArrays:
        return PackedArrays(self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts), self._lengths)


@dataclass(frozen=True, slots=True)
class RowSet:
    """A subset of rows: its size and the staged index of its row numbers, None if it has all rows."""

    count: int
    index: int | None

    @classmethod
    def of(cls, mask: npt.NDArray[np.bool_], packer: Packer) -> "RowSet":
        """Return the set of rows in which `mask` is true."""
        count = int(np.count_nonzero(mask))
        return cls(count, packer.add(np.flatnonzero(mask)) if 0 < count < mask.size else None)


class CopyEvent(Protocol):
    """The methods of `torch.cuda.Event` that BufferRing uses."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def pinned_buffer(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.int64, pin_memory=True)


class BufferRing:
    """Pinned buffers used in turn. A buffer is reused after the event of its last copy."""

    def __init__(
        self,
        size: int = 4,
        *,
        make_buffer: Callable[[int], Tensor] = pinned_buffer,
        make_event: Callable[[], CopyEvent] = torch.cuda.Event,
    ) -> None:
        self._slots: list[tuple[Tensor, CopyEvent] | None] = [None] * size
        self._next = 0
        self._make_buffer = make_buffer
        self._make_event = make_event

    def take(self, size: int) -> tuple[Tensor, CopyEvent]:
        """Return the next buffer, of at least `size` elements, and the event to record after its copy.

        Blocks until the buffer's last copy is done.
        """
        index = self._next
        self._next = (index + 1) % len(self._slots)
        slot = self._slots[index]
        if slot is not None:
            slot[1].synchronize()
        if slot is None or slot[0].numel() < size:
            capacity = max(4096, 1 << (size - 1).bit_length())
            slot = self._make_buffer(capacity), self._make_event()
            self._slots[index] = slot
        return slot


class Staging:
    """Moves packed arrays to the device.

    On a CPU the packed memory becomes the tensors without a copy; every step has its own memory, so steps in flight are
    not affected by later ones. On CUDA it is copied through a ring of pinned buffers.
    """

    def __init__(self, device: torch.device, ring: BufferRing | None = None) -> None:
        self._device = device
        self._ring = ring or (BufferRing() if device.type == "cuda" else None)

    def ship(self, arrays: PackedArrays) -> Sequence[Tensor]:
        """Return the arrays on the device, each [size] int64, by staged index."""
        values = arrays.values
        on_device = torch.from_numpy(values).to(self._device) if self._ring is None else self._copy(values, self._ring)
        return torch.split(on_device, arrays.lengths)

    def _copy(self, packed: IntArray, ring: BufferRing) -> Tensor:
        buffer, copied = ring.take(packed.size)
        staged = buffer[: packed.size]
        staged.numpy()[:] = packed
        on_device = staged.to(self._device, non_blocking=True, copy=True)
        copied.record()
        return on_device


class DraftCopy:
    """The copy to the host of the draft tokens of a step's `rows` under a grammar, while the step's layers run: the
    masks of the samples behind draft tokens depend on these. `started` is done once `start` was called."""

    def __init__(self, rows: Sequence[int], slots: int) -> None:
        """`slots`: staged index, of the rows' slots."""
        self.rows = rows
        self.slots = slots
        self.started: Future[_Read] = Future()

    def start(self, draft_ids: Tensor) -> None:
        """Copy `draft_ids` [rows, drafts] int64, which has NONE behind each row's last one. Call it on the stream that
        proposes them."""
        self.started.set_result(_copy(draft_ids))

    def by_row(self) -> dict[int, list[int]]:
        """Return each row's draft tokens, after waiting for the device. Call it when `started` is done."""
        rows = zip(self.rows, self.started.result()(), strict=True)
        return {row: [token_id for token_id in ids if token_id != NONE] for row, ids in rows}


def _copy(tensor: Tensor) -> _Read:
    if tensor.is_cpu:
        values = tensor.tolist()
        return lambda: values
    on_host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[list[int]]:
        copied.synchronize()
        values: list[list[int]] = on_host.tolist()
        return values

    return read
