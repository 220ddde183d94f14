"""StateColumns: the slots from which a step's rows read the states of recurrent layers, and to which they write
them; with drafts, also of how many tokens they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from proa_engine.core.types import NewRequestData
from proa_engine.kernels.states.replay_rows import make_replay
from proa_engine.kernels.states.state_rows import NO_REPLAY, NoReplay, Replay, StateRows
from proa_engine.layers.attention_metadata import AttentionMetadata
from proa_engine.step.columns import Columns, ForwardInputs, Rows
from proa_engine.step.decode_graphs import STATE_COLUMNS, GraphShape
from proa_engine.step.slots import Edits, SlotTables
from proa_engine.step.staging import IntArray, Packer


class Segments(NamedTuple):
    """The tensors of `StateRows` on the host, in the order of its fields."""

    read: IntArray
    write: IntArray
    first_segments: IntArray
    segment_start_loc: IntArray


@dataclass(frozen=True, slots=True)
class StateInputs:
    segments: list[int]  # staged indices: the arrays of `Segments`

    def fill(self, forward: ForwardInputs, arrays: Sequence[Tensor]) -> None:
        replay = self.replay(forward.metadata, arrays)
        read, write, first_segments, segment_starts = (arrays[index].int() for index in self.segments)
        forward.metadata.states = StateRows(read, write, first_segments, segment_starts, replay)

    def replay(self, metadata: AttentionMetadata, arrays: Sequence[Tensor]) -> Replay | NoReplay:
        """Return what the step's rows compute again."""
        return NO_REPLAY


@dataclass(frozen=True, slots=True)
class DraftStateInputs(StateInputs):
    """In an engine with drafts."""

    columns: "StateColumns"
    slots: int  # staged index: [rows]
    num_samples: int  # staged index: [rows]
    num_rows: int  # see `Replay`

    def replay(self, metadata: AttentionMetadata, arrays: Sequence[Tensor]) -> Replay:
        slots, num_tokens = arrays[self.slots], metadata.query_start_loc.diff()
        num_samples = arrays[self.num_samples]
        return self.columns.replay(metadata, slots, metadata.seq_lens, num_tokens, num_samples, self.num_rows)


class StateColumns(Columns):
    """The state slot of each request, on the host. `Rows.states` has the rows that read or write other slots.

    With drafts, only the device knows how many tokens a request has. It also keeps of how many the request's states
    are, and so knows the tokens that its next row computes again.
    """

    def __init__(self, tables: SlotTables, num_kept: int = 0) -> None:
        """`num_kept`: tokens of a request of which layers keep inputs; 0 without drafts."""
        self.slots = np.zeros(tables.num_slots, np.int64)
        self._num_kept = num_kept
        # [slots] int32: tokens before the state of each slot's request. The last one is of padding.
        self._positions = torch.zeros(tables.num_slots + 1, dtype=torch.int32, device=tables.device)

    def add(self, request: NewRequestData, slot: int, edits: Edits) -> None:
        if self._num_kept:
            edits.write(self._positions, (slot,), (request.num_computed_tokens,))

    def lay_out(self, rows: Rows, packer: Packer) -> StateInputs:
        segments = [packer.add(array) for array in self.cut_into_segments(rows)]
        if not self._num_kept:
            return StateInputs(segments)
        num_rows = int(np.count_nonzero(rows.counts == np.maximum(rows.num_samples, 1)))
        return DraftStateInputs(segments, self, packer.add(rows.slots), packer.add(rows.num_samples), num_rows)

    def lay_out_decodes(self, rows: Rows) -> IntArray:
        segments = self.cut_into_segments(rows)
        return np.stack((segments.read, segments.write))

    def fill_decodes(self, forward: ForwardInputs, columns: Tensor, shape: GraphShape) -> None:
        read, write = columns[STATE_COLUMNS].int()
        metadata = forward.metadata
        replay: Replay | NoReplay = NO_REPLAY
        if self._num_kept:
            slots, ends, num_tokens = columns[:3]
            replay = self.replay(metadata, slots, ends, num_tokens, num_tokens, shape.num_rows)
        starts = first_segments = metadata.query_start_loc
        if shape.width > 1:
            first_segments = torch.arange(shape.num_rows + 1, dtype=torch.int32, device=starts.device)
        metadata.states = StateRows(read, write, first_segments, starts, replay)

    def replay(
        self,
        metadata: AttentionMetadata,
        slots: Tensor,
        ends: Tensor,
        num_tokens: Tensor,
        num_samples: Tensor,
        num_rows: int,
    ) -> Replay:
        """Return what a step's rows compute again, from true ends; see `make_replay`. Can be captured."""
        return make_replay(
            self._positions,
            slots,
            ends,
            num_tokens,
            num_samples,
            metadata.query_start_loc,
            width=self._num_kept,
            num_rows=num_rows,
        )

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
