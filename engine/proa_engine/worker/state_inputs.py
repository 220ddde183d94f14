"""StateInputs: the slots in which a step's rows read and write their states. Host work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from proa_engine.core.types import StateSteps
from proa_engine.kernels.state_rows import StateRows
from proa_engine.worker.columns import Rows
from proa_engine.worker.staging import IntArray, Packer


@dataclass(frozen=True, slots=True)
class StateInputs:
    """The tensors of `StateRows` as staged indices."""

    read: int
    write: int
    first_segments: int
    segment_start_loc: int

    def on_device(self, arrays: Sequence[Tensor]) -> StateRows:
        """`arrays` are the step's staged arrays."""
        read, write = arrays[self.read].int(), arrays[self.write].int()
        return StateRows(read, write, arrays[self.first_segments].int(), arrays[self.segment_start_loc].int())


@dataclass(frozen=True, slots=True)
class Segments:
    """The tensors of `StateRows` on the host."""

    read: IntArray
    write: IntArray
    first_segments: IntArray
    segment_start_loc: IntArray

    def pack(self, packer: Packer) -> StateInputs:
        return StateInputs(
            read=packer.add(self.read),
            write=packer.add(self.write),
            first_segments=packer.add(self.first_segments),
            segment_start_loc=packer.add(self.segment_start_loc),
        )


class StateColumns:
    """Of recurrent layers. Steps name new slots (`StateSteps`), so there is nothing to add. `slots` [slots of the
    batch]: where each request's state is."""

    def __init__(self, max_num_seqs: int) -> None:
        self.slots = np.zeros(max_num_seqs, np.int64)

    def lay_out(self, rows: Rows, states: Mapping[str, StateSteps]) -> Segments:
        """The segments of a step. A row that `states` does not name has one, which reads and writes its own slot.

        Afterwards each row's own slot is the one that its last segment writes.
        """
        read = self.slots[rows.slots]
        if not states:
            return Segments(read, read, np.arange(read.size + 1), rows.query_start_loc)
        write: list[int] = []
        ends: list[int] = []
        counts: list[int] = []
        for row, request_id in enumerate(rows.request_ids):
            first, start = int(rows.query_start_loc[row]), int(rows.starts[row])
            steps = states.get(request_id)
            cuts: Sequence[tuple[int, int]] = ((int(rows.ends[row]), int(read[row])),)
            if steps is not None:
                read[row], cuts = steps.read, steps.cuts
                self.slots[rows.slots[row]] = cuts[-1][1]
            assert cuts[-1][0] == rows.ends[row], "the last cut is at the end of the chunk"
            ends += [first + position - start for position, _ in cuts]
            write += [slot for _, slot in cuts]
            counts.append(len(cuts))
        return Segments(read, np.array(write, np.int64), np.cumsum([0, *counts]), np.array([0, *ends], np.int64))
