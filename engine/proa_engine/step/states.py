"""StateColumns: the slots from which a step's rows read the states of recurrent layers, and to which they write
them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from proa_engine.kernels.states.state_rows import StateRows
from proa_engine.step.columns import Columns, ForwardInputs, Rows
from proa_engine.step.decode_graphs import STATE_COLUMNS, GraphShape
from proa_engine.step.slots import SlotTables
from proa_engine.step.staging import IntArray, Packer


class Segments(NamedTuple):
    """The tensors of `StateRows` on the host, in the order of its fields."""

    read: IntArray
    write: IntArray
    first_segments: IntArray
    segment_start_loc: IntArray


@dataclass(frozen=True, slots=True)
class StateInputs:
    indices: list[int]  # staged: the arrays of `Segments`

    def fill(self, forward: ForwardInputs, arrays: Sequence[Tensor]) -> None:
        forward.metadata.states = StateRows(*(arrays[index].int() for index in self.indices))


class StateColumns(Columns):
    """The state slot of each request, on the host. `Rows.states` has the rows that read or write other slots."""

    def __init__(self, tables: SlotTables) -> None:
        self.slots = np.zeros(tables.num_slots, np.int64)

    def lay_out(self, rows: Rows, packer: Packer) -> StateInputs:
        return StateInputs([packer.add(array) for array in self.cut_into_segments(rows)])

    def lay_out_decodes(self, rows: Rows) -> IntArray:
        segments = self.cut_into_segments(rows)
        return np.stack((segments.read, segments.write))

    def fill_decodes(self, forward: ForwardInputs, columns: Tensor, shape: GraphShape) -> None:
        read, write = columns[STATE_COLUMNS].int()
        starts = forward.metadata.query_start_loc
        forward.metadata.states = StateRows(read, write, starts, starts)

    def cut_into_segments(self, rows: Rows) -> Segments:
        """Return the segments of a step. A row without an entry in `rows.states` is one segment, which reads and writes
        its request's slot.

        Afterwards each request's slot is the one that its last segment writes.
        """
        read = self.slots[rows.slots]
        if not rows.states:
            return Segments(read, read, np.arange(read.size + 1), rows.query_start_loc)
        slots: list[int] = []
        ends: list[int] = []
        counts: list[int] = []
        for row, request_id in enumerate(rows.request_ids):
            first, start = int(rows.query_start_loc[row]), int(rows.starts[row])
            steps = rows.states.get(request_id)
            writes: Sequence[tuple[int, int]] = ((int(rows.ends[row]), int(read[row])),)
            if steps is not None:
                read[row], writes = steps.read, steps.writes
                self.slots[rows.slots[row]] = writes[-1][1]
            assert writes[-1][0] == rows.ends[row], "the last write is at the end of the chunk"
            ends += [first + position - start for position, _ in writes]
            slots += [slot for _, slot in writes]
            counts.append(len(writes))
        return Segments(read, np.array(slots, np.int64), np.cumsum([0, *counts]), np.array([0, *ends], np.int64))
