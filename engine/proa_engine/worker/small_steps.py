"""Small steps on a CPU: run on one thread, and not worth handing to another thread.

After a parallel region torch's threads spin on cores that the scheduler, the network and other processes need, and the
next region waits for a thread that has lost its core. A device thread and a scheduling thread contend for the
interpreter lock. Measured with the built-in model, one request and two cores: one thread is as fast as two, and ten
times as fast beside busy processes; a scheduling thread that computes the steps itself needs one core instead of two.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_STEP = 1 << 22  # multiplications, estimated as tokens times parameters


class SmallSteps:
    """Steps of at most `max_tokens` tokens; 0: none."""

    def __init__(self, max_tokens: int) -> None:
        self._num_threads = torch.get_num_threads()
        self._max_tokens = max_tokens

    def include(self, num_tokens: int) -> bool:
        return num_tokens <= self._max_tokens

    @contextmanager
    def one_thread(self, num_tokens: int) -> Iterator[None]:
        """Limit torch to one thread if the step is small. The count is process-wide, so it is restored afterwards."""
        if self._num_threads == 1 or not self.include(num_tokens):
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(self._num_threads)
