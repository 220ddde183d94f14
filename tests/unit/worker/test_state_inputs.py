"""The segments of a step's rows and the slots that they read and write."""

import numpy as np

from proa_engine.core.types import NO_STATE, StateSteps
from proa_engine.worker.columns import Rows
from proa_engine.worker.decode_graphs import pad_rows
from proa_engine.worker.state_inputs import StateColumns


def make_columns() -> StateColumns:
    columns = StateColumns(4)
    columns.slots[:] = [7, 8, 9, 10]
    return columns


def rows_of(slots: dict[str, int], starts: list[int], ends: list[int]) -> Rows:
    counts = np.array(ends) - np.array(starts)
    starts_of_rows = np.concatenate(([0], np.cumsum(counts)))
    return Rows(list(slots), np.array(list(slots.values())), np.array(starts), np.array(ends), starts_of_rows)


def test_rows_without_steps_read_and_write_their_own_slots() -> None:
    segments = make_columns().lay_out(rows_of({"a": 2, "b": 0}, [5, 3], [6, 8]), {})
    assert segments.read.tolist() == segments.write.tolist() == [9, 7]
    assert segments.first_segments.tolist() == [0, 1, 2]
    assert segments.segment_start_loc.tolist() == [0, 1, 6]


def test_a_chunk_is_cut_at_its_checkpoints_and_later_steps_go_on_from_its_last_slot() -> None:
    columns = make_columns()
    rows = rows_of({"a": 2, "b": 0, "c": 1}, [5, 0, 16], [6, 40, 24])
    states = {"b": StateSteps(-1, ((16, 3), (32, 4), (40, 5))), "c": StateSteps(1, ((24, 2),))}
    segments = columns.lay_out(rows, states)
    assert segments.read.tolist() == [9, -1, 1]
    assert segments.write.tolist() == [9, 3, 4, 5, 2]
    assert segments.first_segments.tolist() == [0, 1, 4, 5]
    assert segments.segment_start_loc.tolist() == [0, 1, 17, 33, 41, 49]
    assert columns.slots.tolist() == [5, 2, 9, 10]


def test_padding_rows_of_a_graph_have_no_state() -> None:
    slots, ends = np.array([3, 1]), np.array([8, 5])
    rows = pad_rows(slots, ends, 1, 3, (np.array([4, NO_STATE]), np.array([4, 6]))).reshape(5, 3)
    assert rows.tolist() == [[3, 1, 0], [8, 5, 0], [1, 1, 0], [4, -1, -1], [4, 6, -1]]
