"""CUDA graphs of decode steps, captured once for each of several batch sizes and replayed with one call.

A row has one token, or one and the draft tokens that the step verifies; all rows of a graph have the same width. A
batch is padded to the next captured number of rows, and rows to the width. A graph reads and writes fixed memory, so
each step's input is copied into one static tensor of rows. Results of padding are dropped, and padding writes nothing
to the KV cache.

A shape has two graphs: one of the layers, and a small one that computes logits from its hidden states and samples. A
step with penalties, token rules, log probabilities, grammars or drafts replays the first alone. One graph of both would
save a launch, but such steps would need another graph of the layers, or compute the logits twice. Logits are no graph's
result, so that all graphs share their memory.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from proa.imports import no_garbage_collection
from proa_engine.core.types import NO_LORA, NO_STATE
from proa_engine.step.staging import IntArray

STATE_COLUMNS = slice(3, 5)  # of `pad_rows`, in models with states: the slots that are read and written
_PADDING = -1
assert _PADDING == NO_STATE == NO_LORA
_SIZE_STEP = 8  # rows between capture sizes
# Tokens of the largest graph with drafts. The device computes more tokens for longer than the host launches kernels.
_MAX_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class GraphShape:
    num_rows: int
    width: int  # tokens of a row, padding included
    has_loras: bool = False  # whether a row may have an adapter

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.width


def graph_shapes(
    max_num_seqs: int,
    max_drafts: int = 0,
    max_num_batched_tokens: int = _MAX_TOKENS,
    *,
    with_loras: bool = False,
) -> list[GraphShape]:
    """Return the shapes to capture, smallest first: 1, 2, 4, multiples of 8 or `max_num_seqs` rows, of one token each,
    and of one token and `max_drafts` draft tokens each.

    Both widths are captured, because requests that cannot speculate would otherwise compute only padding. `with_loras`:
    each shape is also captured with adapters, so that steps without adapters do not launch their kernels.
    """
    counts = {1, 2, 4, *range(_SIZE_STEP, max_num_seqs + 1, _SIZE_STEP), max_num_seqs}
    shapes = {
        GraphShape(count, width, has_loras)
        for count in counts
        if count <= max_num_seqs
        for width in (1, 1 + max_drafts)
        for has_loras in {False, with_loras}
    }
    most = min(_MAX_TOKENS, max_num_batched_tokens)
    return sorted(
        (shape for shape in shapes if shape.width == 1 or shape.num_tokens <= most),
        key=lambda shape: (shape.num_tokens, shape.width, shape.has_loras),
    )


def pad_rows(
    slots: IntArray, ends: IntArray, num_tokens: IntArray | int, size: int, others: Sequence[IntArray] = ()
) -> IntArray:
    """Return [columns * size]: slots, ends and numbers of tokens, then the features' columns `others`, [columns, rows]
    each, as `DecodeGraphs.replay` takes them. Padding has no tokens, and -1 in the features' columns."""
    rows = np.zeros((3 + sum(map(len, others)), size), np.int64)
    rows[0, : slots.size] = slots
    rows[1, : slots.size] = ends
    rows[2, : slots.size] = num_tokens
    if others:
        rows[3:] = _PADDING
        rows[3:, : slots.size] = np.concatenate(others)
    return rows.reshape(-1)


@dataclass(frozen=True, slots=True)
class Graph:
    replay: Callable[[], None]
    result: Tensor  # of the captured function, after a replay


class GraphCapture(Protocol):
    def capture(self, first: Callable[[], Tensor], *others: Callable[[Tensor], Tensor]) -> list[Graph]:
        """Capture each function as a graph. Each of `others` is called with the result of the function before it."""
        ...


class DecodeGraphs:
    """Graphs of these shapes. Without shapes there is nothing to capture, and every step is computed without a
    graph."""

    def __init__(self, shapes: Sequence[GraphShape], device: torch.device, *, has_states: bool = False) -> None:
        self._shapes = sorted(shapes, key=lambda shape: shape.num_tokens)
        self._sizes: dict[int, list[int]] = {}  # width -> numbers of rows, ascending
        for shape in self._shapes:
            if not shape.has_loras:
                self._sizes.setdefault(shape.width, []).append(shape.num_rows)
        most = max((shape.num_rows for shape in shapes), default=0)
        self._num_columns = 5 if has_states else 3  # without adapters
        self._rows = torch.empty((self._num_columns + 1) * most, dtype=torch.int64, device=device)
        self._graphs: dict[GraphShape, list[Graph]] = {}
        self.are_captured = False

    def capture(
        self,
        decode: Callable[[Tensor, GraphShape], Tensor],
        capture: GraphCapture,
        *rest: Callable[[Tensor, GraphShape, Tensor], Tensor],
    ) -> None:
        """Capture `decode` for every shape, and `rest`, one function or none: what follows.

        `decode` takes the columns of `pad_rows`, [columns, num_rows] int64, and the shape, and returns hidden states
        [num_rows * width, …]. `rest` takes these too. The largest shape is captured first, so that the smaller graphs
        reuse its memory.
        """
        for shape in reversed(self._shapes):
            num_columns = self._num_columns + shape.has_loras
            rows = self._rows[: num_columns * shape.num_rows].view(num_columns, -1)
            rows.zero_()  # padding reads slot 0, which always exists
            rows[3:] = _PADDING
            more = (partial(each, rows, shape) for each in rest)
            self._graphs[shape] = capture.capture(partial(decode, rows, shape), *more)
        self.are_captured = bool(self._graphs)

    def shape_for(self, num_rows: int, most_tokens: int) -> GraphShape | None:
        """Return the smallest captured shape for `num_rows` rows of at most `most_tokens` tokens, without adapters;
        None if there is none."""
        width = min((width for width in self._sizes if width >= most_tokens), default=None)
        if not self.are_captured or width is None or num_rows > self._sizes[width][-1]:
            return None
        sizes = self._sizes[width]
        return GraphShape(sizes[bisect_left(sizes, num_rows)], width)

    def replay(self, shape: GraphShape, rows: Tensor) -> Tensor:
        """Run the graph of the layers of this shape on `rows`, as returned by `pad_rows`.

        Returns hidden states [num_rows * width, …]; the next replay overwrites them.
        """
        self._rows[: rows.numel()].copy_(rows)
        return _run(self._graphs[shape][0])

    def replay_rest(self, shape: GraphShape) -> Tensor:
        """Run the graph of what follows the layers, on the rows and the hidden states of the last `replay`.

        Returns its result; the next call overwrites it.
        """
        return _run(self._graphs[shape][1])

    def clear(self) -> None:
        """Delete the graphs. A process group cannot be destroyed while graphs that use it exist."""
        self._graphs.clear()
        self.are_captured = False


class CudaGraphCapture:
    """Captures CUDA graphs that share one memory pool, since only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def capture(self, first: Callable[[], Tensor], *others: Callable[[Tensor], Tensor]) -> list[Graph]:
        graphs = [self._capture(first)]
        for work in others:
            graphs.append(self._capture(partial(work, graphs[-1].result)))
        return graphs

    def _capture(self, work: Callable[[], Tensor]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()  # one-time initialization must not be captured
            self._stream.synchronize()
            with no_garbage_collection():  # freeing a graph, an event or a stream's tensor fails during a capture
                # thread_local: NCCL's watchdog thread may query its events during the capture.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                result = work()
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return Graph(graph.replay, result)


@dataclass(frozen=True, slots=True)
class ReportedCapture:
    """Captures with `inner` and calls `on_captured` after each shape."""

    inner: GraphCapture
    on_captured: Callable[[], None]

    def capture(self, first: Callable[[], Tensor], *others: Callable[[Tensor], Tensor]) -> list[Graph]:
        graphs = self.inner.capture(first, *others)
        self.on_captured()
        return graphs


def _run(graph: Graph) -> Tensor:
    graph.replay()
    return graph.result
