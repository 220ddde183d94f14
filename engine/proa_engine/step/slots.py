"""SlotTables: every running request's tokens and blocks, by slot; Edits: what a step writes to such tables.

A request keeps its slot, its row in every table, until it finishes or is preempted. The host side changes when a step's
inputs are built; the device side changes with that step, in stream order, so steps in flight do not see later edits.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from proa_engine.step.staging import IntArray, Packer


class SlotTables:
    """The tokens and blocks of slots 0 … max_num_seqs - 1, on the host and on the device, allocated once.

    The token table holds prompts and sampled tokens, so the next step, penalties and bad words read sampled tokens
    without the host.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        num_tables: int = 1,
        has_position_deltas: bool = False,
    ) -> None:
        self.num_slots = self.padding_slot = max_num_seqs  # padding has token 0 everywhere, and block 0 in every table
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.device = device
        self.token_width = max_model_len + 1
        self.max_blocks = -(-max_model_len // block_size)
        # Tokens in the table, including those still being sampled. With drafts this is a lower bound.
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int64)
        self.token_ids = torch.zeros(max_num_seqs + 1, self.token_width, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(num_tables, max_num_seqs + 1, self.max_blocks, dtype=torch.int32, device=device)
        # [slots] int64, for models with three positions a token: added to the places of tokens behind all images.
        self.position_deltas: Tensor | None = None
        if has_position_deltas:
            self.position_deltas = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.flat_token_ids = self.token_ids.view(-1)
        self.flat_block_tables = self.block_tables.view(-1)


@dataclass(frozen=True, slots=True)
class PackedEdits:
    """Edits with staged indices in place of values."""

    first_array: int  # staged index of the first; the step's arrays before it are not edits
    slices: Sequence[tuple[Tensor, int, int]] = ()  # table, first row, values
    rows: Sequence[tuple[Tensor, int, int]] = ()  # table, rows, values
    fills: Sequence[Callable[[], None]] = ()

    def apply(self, arrays: Sequence[Tensor]) -> None:
        """Write the edits to the device's tables. `arrays` are the step's staged arrays."""
        for fill in self.fills:
            fill()
        for table, start, values in self.slices:
            table[start : start + arrays[values].numel()] = arrays[values]
        for table, rows, values in self.rows:
            staged = arrays[values].view(torch.float64) if table.is_floating_point() else arrays[values]
            table.index_copy_(0, arrays[rows], staged.to(table.dtype).view(-1, *table.shape[1:]))


@dataclass(slots=True)
class Edits:
    """What a step writes to tables on the device before it reads them."""

    _slices: list[tuple[Tensor, int, IntArray]] = field(default_factory=list)
    _rows: dict[int, tuple[Tensor, list[int], list[float]]] = field(default_factory=dict)  # by id of the table
    _fills: list[Callable[[], None]] = field(default_factory=list)

    def write(self, table: Tensor, rows: Iterable[int], values: Iterable[float]) -> None:
        """Write rows of a table of integers or float64. `values` are the rows' values, concatenated."""
        edit = self._rows.get(id(table))
        if edit is None:
            edit = self._rows[id(table)] = table, [], []
        _, all_rows, all_values = edit
        all_rows += rows
        all_values += values

    def write_slice(self, table: Tensor, start: int, values: Sequence[int]) -> None:
        """Write neighbouring entries of a table [entries], for long runs of them."""
        self._slices.append((table, start, np.array(values, np.int64)))

    def run(self, fills: Iterable[Callable[[], None]]) -> None:
        """Call these functions, which queue device work, before the step."""
        self._fills += fills

    def pack(self, packer: Packer) -> PackedEdits:
        first_array = packer.num_arrays
        rows = []
        for table, numbers, values in self._rows.values():
            if table.is_floating_point():
                staged = packer.add_floats(np.array(values, np.float64))
            else:
                staged = packer.add(np.array(values, np.int64))
            rows.append((table, packer.add(np.array(numbers, np.int64)), staged))
        slices = [(table, start, packer.add(values)) for table, start, values in self._slices]
        return PackedEdits(first_array, slices, rows, self._fills)
