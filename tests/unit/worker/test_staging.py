"""Staging: one copy per step, and a buffer is not overwritten while it is being copied."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from proa_engine.step.staging import BufferRing, PackedArrays, Packer, Staging

CPU = torch.device("cpu")


class Device:
    """Makes the ring's buffers and events, and logs each event with its buffer's first element."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.num_events = 0
        self.log: list[tuple[str, int, int]] = []  # (action, buffer, first element)

    def make_buffer(self, size: int) -> Tensor:
        self.buffers.append(torch.zeros(size, dtype=torch.int64))
        return self.buffers[-1]

    def make_event(self) -> "Event":
        self.num_events += 1
        return Event(self, self.num_events - 1)

    def staging(self, ring_size: int) -> Staging:
        return Staging(CPU, BufferRing(ring_size, make_buffer=self.make_buffer, make_event=self.make_event))


class Event:
    def __init__(self, device: Device, number: int) -> None:
        self._device = device
        self._number = number

    def record(self) -> None:
        self._log("copied")

    def synchronize(self) -> None:
        self._log("waited")

    def _log(self, action: str) -> None:
        self._device.log.append((action, self._number, int(self._device.buffers[self._number][0])))


def packed(*arrays: Sequence[int]) -> PackedArrays:
    packer = Packer()
    for array in arrays:
        packer.add(np.array(array, dtype=np.int64))
    return packer.pack()


def test_a_buffer_is_reused_only_after_the_event_of_its_last_copy() -> None:
    device = Device()
    staging = device.staging(ring_size=2)

    shipped = [staging.ship(packed([number]))[0] for number in (1, 2, 3, 4)]

    assert device.log == [
        ("copied", 0, 1),
        ("copied", 1, 2),
        ("waited", 0, 1),  # not overwritten before
        ("copied", 0, 3),
        ("waited", 1, 2),
        ("copied", 1, 4),
    ]
    assert [tensor.tolist() for tensor in shipped] == [[1], [2], [3], [4]]
    assert len(device.buffers) == 2


def test_a_buffer_that_is_too_small_is_replaced_only_after_its_copy() -> None:
    device = Device()
    staging = device.staging(ring_size=1)

    staging.ship(packed([1]))
    (large,) = staging.ship(packed(range(5000)))

    assert device.log == [("copied", 0, 1), ("waited", 0, 1), ("copied", 1, 0)]
    assert [buffer.numel() for buffer in device.buffers] == [4096, 8192]
    assert large.tolist() == list(range(5000))


def test_arrays_are_found_by_their_staged_index_and_floats_keep_their_bits() -> None:
    arrays = Packer()
    whole = arrays.add(np.arange(3))
    floats = arrays.add_floats(np.array([0.1, -2.5]))

    shipped = Staging(CPU).ship(arrays.pack())

    assert shipped[whole].tolist() == [0, 1, 2]
    assert shipped[floats].view(torch.float64).tolist() == [0.1, -2.5]
