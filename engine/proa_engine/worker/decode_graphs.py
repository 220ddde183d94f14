"""DecodeGraphs: steps of decodes alone, recorded once for each of some batch sizes and replayed by one call.

A smaller batch is padded to the next size. A recording reads and writes fixed memory: what changes from step to step
comes in through one static tensor of rows. What a padded row computes is thrown away, and it writes nothing.
Knows neither the model nor what records; on CUDA that is `CudaRecorder`.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from proa_engine.worker.staging import IntArray

PADDING = -1
_STEP = 8  # between sizes


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4 and multiples of 8, up to the largest batch itself."""
    sizes = {1, 2, 4, *range(_STEP, max_num_seqs + 1, _STEP), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


def pad_rows(slots: IntArray, positions: IntArray, size: int) -> IntArray:
    """[2 * size]: the slots, then the positions, as `DecodeGraphs.replay` takes them."""
    rows = np.zeros((2, size), np.int64)
    rows[0, : slots.size] = slots
    rows[1, : slots.size] = positions
    rows[1, slots.size :] = PADDING
    return rows.reshape(-1)


class Recorder(Protocol):
    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Run `work` for the record; returns what replays it, and the tensor in which its result then lies."""
        ...


class DecodeGraphs:
    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes = sorted(sizes)
        self._rows = torch.empty(2 * self.sizes[-1], dtype=torch.int64, device=device)
        self._graphs: dict[int, tuple[Callable[[], None], Tensor]] = {}

    def record(self, decode: Callable[[Tensor], Tensor], recorder: Recorder) -> None:
        """Record `decode`, which takes rows [2, size], slots and positions, and returns something a row.

        The largest first: the smaller ones fit into its memory.
        """
        for size in reversed(self.sizes):
            rows = self._rows[: 2 * size].view(2, size)
            rows[0], rows[1] = 0, PADDING  # a slot that exists, and no token
            self._graphs[size] = recorder.record(lambda rows=rows: decode(rows))  # type: ignore[misc]

    def size_for(self, num_rows: int) -> int | None:
        """The least recorded size that holds so many rows."""
        if not self._graphs or num_rows > self.sizes[-1]:
            return None
        return self.sizes[bisect_left(self.sizes, num_rows)]

    def replay(self, size: int, rows: Tensor) -> Tensor:
        """`rows` [2 * size] is of `pad_rows`. The result is overwritten by the next replay."""
        self._rows[: 2 * size].copy_(rows)
        replay, result = self._graphs[size]
        replay()
        return result

    def forget(self) -> None:
        """Let go of the recordings. A communicator cannot be closed while there is one that it takes part in."""
        self._graphs.clear()


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory, since only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()  # what a first call makes once for all, a recording must not hold
            self._stream.synchronize()
            # thread_local: the communication library's own thread may go on asking for its events.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            result = work()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay, result
