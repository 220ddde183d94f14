"""SmallSteps: which steps of a CPU are too small to share, between threads of a product or between planner and device.

After a parallel region its threads spin, on cores that planning, the network and other processes want too, and the next
region waits for a thread that has lost its core. A device thread, and who plans beside it, wait for each other's hold
on the interpreter. Measured with the built-in model, one request and two cores: one thread is as fast as two, and ten
times as fast beside busy neighbours; a planner that does the device's work itself needs one core for what took two.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_STEP = 1 << 22  # numbers multiplied, about: tokens times parameters


class SmallSteps:
    def __init__(self, num_parameters: int) -> None:
        self._num_threads = torch.get_num_threads()
        self._most_tokens = SMALL_STEP // num_parameters

    def include(self, num_tokens: int) -> bool:
        return num_tokens <= self._most_tokens

    @contextmanager
    def one_thread(self, num_tokens: int) -> Iterator[None]:
        """For a small step. Torch's count is one for all of the process's work, so it is put back afterwards."""
        if self._num_threads == 1 or not self.include(num_tokens):
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(self._num_threads)
