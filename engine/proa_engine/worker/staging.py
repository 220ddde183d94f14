"""Staging: one step's host arrays cross to the device in a single copy.

Everything is int64, so that one buffer holds it all; floats travel as the bits of float64. Knows nothing of what the
arrays mean.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]


class Packer:
    """Collects arrays; `add` returns the place at which `Staging.ship` will return each on the device."""

    def __init__(self) -> None:
        self._parts: list[IntArray] = []

    def add(self, array: IntArray) -> int:
        self._parts.append(array)
        return len(self._parts) - 1

    def add_floats(self, array: npt.NDArray[np.float64]) -> int:
        return self.add(np.ascontiguousarray(array).reshape(-1).view(np.int64))

    def pack(self) -> tuple[IntArray, list[int]]:
        """All arrays end to end, in memory of their own, and their lengths."""
        return np.concatenate(self._parts), [part.size for part in self._parts]


class Staging:
    """Moves packed arrays to the device.

    On a CPU the packed memory itself becomes the tensor; each step's is its own, so a step in flight keeps what it
    reads. On CUDA pinned buffers form a ring, and one is written again only after the event of its last copy.
    """

    def __init__(self, device: torch.device, ring_size: int = 4) -> None:
        self._device = device
        self._ring: list[tuple[Tensor, torch.cuda.Event] | None] = [None] * ring_size
        self._next = 0

    def ship(self, packer: Packer) -> Sequence[Tensor]:
        packed, lengths = packer.pack()
        on_device = self._copy(packed) if self._device.type == "cuda" else torch.from_numpy(packed).to(self._device)
        return torch.split(on_device, lengths)

    def _copy(self, packed: IntArray) -> Tensor:
        buffer, copied = self._pinned(packed.size)
        staged = buffer[: packed.size]
        staged.numpy()[:] = packed
        on_device = staged.to(self._device, non_blocking=True)
        copied.record()
        return on_device

    def _pinned(self, size: int) -> tuple[Tensor, torch.cuda.Event]:
        """The ring's next buffer, free to be written and large enough."""
        place = self._next
        self._next = (place + 1) % len(self._ring)
        slot = self._ring[place]
        if slot is not None:
            slot[1].synchronize()
        if slot is None or slot[0].numel() < size:
            capacity = max(4096, 1 << (size - 1).bit_length())
            slot = torch.empty(capacity, dtype=torch.int64, pin_memory=True), torch.cuda.Event()
            self._ring[place] = slot
        return slot
