"""CUDA graphs of steps with prompts: all layers, captured for several numbers of tokens and replayed with one call.

The host launches the kernels of such a step one by one in more time than the device computes a few hundred tokens of a
small model: 13 ms for 28 layers, of which kernels ran for 3 (1,024 tokens of Qwen3-0.6B on an H200). Larger steps are
not captured.

A graph is captured from the function that computes any step. It reads the step's arrays from fixed memory: those of
`num_tokens` tokens, of `num_decodes` rows of one token and of `num_prompts` others. A row of padding is empty, except
the one behind the prompts, which has the tokens of padding. These are tokens of the padding slot at position 0, before
the beginning of their request: they attend to nothing and are written to no block. Results of padding are dropped.
Logits are no part of a graph: most rows of most steps need none.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from proa_engine.step.columns import Rows, TokenRows
from proa_engine.step.decode_graphs import Graph, GraphCapture
from proa_engine.step.slots import SlotTables
from proa_engine.step.staging import IntArray

# Of 16-bit numbers in the largest step: with more of them a Hopper GPU computes for longer than the host launches (8B
# parameters: 24 ms).
_MAX_PRODUCTS = 7 << 40
_TOKENS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_MAX_PROMPTS = 32
_NO_SLOT = -1  # the offset of padding in block 0


@dataclass(frozen=True, slots=True)
class PromptShape:
    num_tokens: int
    num_decodes: int  # rows of one token, padding included; 0: the step has none
    num_prompts: int  # other rows, padding included

    @property
    def lengths(self) -> list[int]:
        """Of the arrays of a `TokenRows`, in the order of its fields."""
        num_rows = self.num_decodes + self.num_prompts
        return [self.num_tokens] * 4 + [num_rows, num_rows + 1, num_rows]

    def token_rows(self, max_seq_len: int) -> TokenRows:
        """The step as `ModelRunner` computes it, of arrays of these `lengths`."""
        return TokenRows(
            num_decodes=self.num_decodes,
            max_seq_len=max_seq_len,
            positions=0,
            token_positions=1,
            block_positions=2,
            block_offsets=3,
            slots=4,
            query_start_loc=5,
            seq_lens=6,
            features=[],
        )

    @property
    def size(self) -> int:
        return sum(self.lengths)


def max_tokens(num_multiplied: int, *, multiplies_8_bits: bool) -> int:
    """Of the largest step to capture. `num_multiplied`: parameters by which a token is multiplied."""
    return _MAX_PRODUCTS * (2 if multiplies_8_bits else 1) // num_multiplied


def prompt_shapes(max_num_seqs: int, max_num_tokens: int) -> list[PromptShape]:
    """Return the shapes to capture for steps of at most `max_num_tokens` tokens, smallest first: with decodes and
    without them, since the kernels of decodes take time even if there are none."""
    return [
        PromptShape(num_tokens, num_decodes, 1 + min(_MAX_PROMPTS, max_num_seqs))
        for num_tokens in _TOKENS
        if num_tokens <= max_num_tokens
        for num_decodes in (0, min(max_num_seqs, num_tokens))
    ]


def pad_prompts(rows: Rows, num_decodes: int, shape: PromptShape, tables: SlotTables) -> IntArray:
    """Return the arrays of a step of `shape` one after the other, as `PromptGraphs.replay` takes them. `rows` are
    `num_decodes` rows of one token, then those of prompts."""
    values = np.zeros(shape.size, np.int64)
    ends = np.cumsum(shape.lengths)[:-1]
    positions, token_positions, block_positions, block_offsets, slots, starts, seq_lens = np.split(values, ends)
    num_tokens, num_prompts = rows.query_start_loc[-1], len(rows.slots) - num_decodes
    positions[:num_tokens] = rows.token_positions()
    token_slots = np.full(shape.num_tokens, tables.padding_slot)
    token_slots[:num_tokens] = np.repeat(rows.slots, rows.counts)
    np.multiply(token_slots, tables.token_width, out=token_positions)
    token_positions += positions
    np.multiply(token_slots, tables.max_blocks, out=block_positions)
    block_positions += positions // tables.block_size
    np.remainder(positions, tables.block_size, out=block_offsets)
    block_offsets[num_tokens:] = _NO_SLOT
    slots[:] = tables.padding_slot
    starts[: num_decodes + 1] = rows.query_start_loc[: num_decodes + 1]
    starts[num_decodes : shape.num_decodes] = num_decodes
    first, last = shape.num_decodes, shape.num_decodes + num_prompts
    starts[first : last + 1] = rows.query_start_loc[num_decodes:]
    starts[last + 1 :] = shape.num_tokens
    for column, of_rows in ((slots, rows.slots), (seq_lens, rows.ends)):
        column[:num_decodes], column[first:last] = of_rows[:num_decodes], of_rows[num_decodes:]
    return values


class PromptGraphs:
    """Graphs of these shapes. Without shapes every step is computed without a graph."""

    def __init__(self, shapes: Sequence[PromptShape], tables: SlotTables) -> None:
        """`shapes`: as from `prompt_shapes`."""
        self._shapes = shapes
        without, with_decodes = ([s for s in shapes if bool(s.num_decodes) == has] for has in (False, True))
        self._by_decodes = without, with_decodes
        self._tables = tables
        most = max((shape.size for shape in shapes), default=0)
        self._values = torch.empty(most, dtype=torch.int64, device=tables.device)
        self._graphs: dict[PromptShape, Graph] = {}
        self.are_captured = False

    def capture(self, forward: Callable[[TokenRows, Sequence[Tensor]], Tensor], capture: GraphCapture) -> None:
        """Capture `forward` for every shape. It takes the arrays of a step and returns hidden states [tokens, …].

        The largest shape is captured first, so that the smaller graphs reuse its memory.
        """
        tables, none = self._tables, np.zeros(0, np.int64)
        nothing = Rows([], none, none, none, none, none, np.zeros(1, np.int64), {})
        max_seq_len = tables.max_blocks * tables.block_size
        for shape in reversed(self._shapes):
            values = self._values[: shape.size]
            values.copy_(torch.from_numpy(pad_prompts(nothing, 0, shape, tables)))
            work = partial(forward, shape.token_rows(max_seq_len), values.split(shape.lengths))
            (self._graphs[shape],) = capture.capture(work)
        self.are_captured = bool(self._graphs)

    def lay_out(self, rows: Rows) -> tuple[PromptShape, IntArray] | None:
        """Return the shape of the graph for a step, and what `replay` takes. None if no shape for it was captured."""
        num_decodes, num_tokens = int(np.count_nonzero(rows.counts == 1)), int(rows.query_start_loc[-1])
        num_prompts, shapes = len(rows.slots) - num_decodes, self._by_decodes[num_decodes > 0]
        index = bisect_left(shapes, num_tokens, key=lambda shape: shape.num_tokens)
        if not self.are_captured or index == len(shapes):
            return None
        shape = shapes[index]
        if num_decodes > shape.num_decodes or not 0 < num_prompts < shape.num_prompts:
            return None
        return shape, pad_prompts(rows, num_decodes, shape, self._tables)

    def replay(self, shape: PromptShape, values: Tensor) -> Tensor:
        """Run the graph of this shape on what `lay_out` returned.

        Returns hidden states [num_tokens, …]; the next replay overwrites them.
        """
        self._values[: values.numel()].copy_(values)
        graph = self._graphs[shape]
        graph.replay()
        return graph.result

    def clear(self) -> None:
        """Delete the graphs. A process group cannot be destroyed while graphs that use it exist."""
        self._graphs.clear()
        self.are_captured = False
