"""CUDA graphs of decode steps, captured once for each of several batch sizes and replayed with one call.

A batch is padded to the next captured size. A graph reads and writes fixed memory, so each step's input is copied into
one static tensor of rows. Results of padding rows are dropped, and padding rows write nothing to the KV cache.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from proa_engine.worker.staging import IntArray

PADDING = -1  # position of a padding row
_SIZE_STEP = 8  # rows between capture sizes


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, the multiples of 8 and `max_num_seqs`."""
    sizes = {1, 2, 4, *range(_SIZE_STEP, max_num_seqs + 1, _SIZE_STEP), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


def pad_rows(slots: IntArray, positions: IntArray, size: int) -> IntArray:
    """[2 * size]: the slots, then the positions, as `DecodeGraphs.replay` takes them."""
    rows = np.zeros((2, size), np.int64)
    rows[0, : slots.size] = slots
    rows[1, : slots.size] = positions
    rows[1, slots.size :] = PADDING
    return rows.reshape(-1)


class GraphCapture(Protocol):
    def capture(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Capture `work`. Return a function that replays it and the tensor that holds its result afterwards."""
        ...


class DecodeGraphs:
    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes = sorted(sizes)
        self._rows = torch.empty(2 * self.sizes[-1], dtype=torch.int64, device=device)
        self._graphs: dict[int, tuple[Callable[[], None], Tensor]] = {}

    def capture(self, decode: Callable[[Tensor], Tensor], capture: GraphCapture) -> None:
        """Capture `decode` for every size. It takes rows [2, size] int64 (slots, positions) and returns [size, …].

        The largest size comes first, so that the smaller graphs reuse its memory.
        """
        for size in reversed(self.sizes):
            rows = self._rows[: 2 * size].view(2, size)
            rows[0], rows[1] = 0, PADDING  # a slot that exists, and no token
            self._graphs[size] = capture.capture(lambda rows=rows: decode(rows))  # type: ignore[misc]

    def size_for(self, num_rows: int) -> int | None:
        """The smallest captured size of at least `num_rows`; None if there is none."""
        if not self._graphs or num_rows > self.sizes[-1]:
            return None
        return self.sizes[bisect_left(self.sizes, num_rows)]

    def replay(self, size: int, rows: Tensor) -> Tensor:
        """Run the graph of `size` on `rows` [2 * size] int64, as made by `pad_rows`. Returns [size, …].

        The next replay overwrites the result.
        """
        self._rows[: 2 * size].copy_(rows)
        replay, result = self._graphs[size]
        replay()
        return result

    def clear(self) -> None:
        """Delete the graphs. A process group cannot be destroyed while graphs that use it exist."""
        self._graphs.clear()


class CudaGraphCapture:
    """Captures CUDA graphs that share one memory pool, since only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def capture(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()  # one-time initialization must not be captured
            self._stream.synchronize()
            with no_garbage_collection():
                # thread_local: NCCL's watchdog thread may query its events during the capture.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                result = work()
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay, result


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect no cycles: freeing a graph, an event or a tensor of another stream is an error during a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
