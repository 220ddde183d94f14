"""The segments of a step's rows and the slots that they read and write."""

from collections.abc import Mapping

import numpy as np
import torch

from proa_engine.core.types import NO_STATE, NO_STATES, StateSteps
from proa_engine.step.columns import Rows
from proa_engine.step.decode_graphs import pad_rows
from proa_engine.step.slots import SlotTables
from proa_engine.step.states import StateColumns


def make_states() -> StateColumns:
    tables = SlotTables(max_num_seqs=4, max_model_len=64, block_size=4, vocab_size=9, device=torch.device("cpu"))
    states = StateColumns(tables)
    states.slots[:] = [7, 8, 9, 10]
    return states


def rows_of(
    slots: dict[str, int], starts: list[int], ends: list[int], states: Mapping[str, StateSteps] = NO_STATES
) -> Rows:
    first, last = np.array(starts), np.array(ends)
    starts_of_rows = np.concatenate(([0], np.cumsum(last - first)))
    num_samples = np.zeros_like(first)
    slots_of_rows = np.array(list(slots.values()))
    return Rows(list(slots), slots_of_rows, first, last, last - first, num_samples, starts_of_rows, states)


def test_rows_without_steps_read_and_write_their_own_slots() -> None:
    segments = make_states().cut_into_segments(rows_of({"a": 2, "b": 0}, [5, 3], [6, 8]))
    assert segments.read.tolist() == segments.write.tolist() == [9, 7]
    assert segments.first_segments.tolist() == [0, 1, 2]
    assert segments.segment_start_loc.tolist() == [0, 1, 6]


def test_a_chunk_is_cut_at_its_checkpoints_and_later_steps_go_on_from_its_last_slot() -> None:
    states = make_states()
    steps = {"b": StateSteps(-1, ((16, 3), (32, 4), (40, 5))), "c": StateSteps(1, ((24, 2),))}
    segments = states.cut_into_segments(rows_of({"a": 2, "b": 0, "c": 1}, [5, 0, 16], [6, 40, 24], steps))
    assert segments.read.tolist() == [9, -1, 1]
    assert segments.write.tolist() == [9, 3, 4, 5, 2]
    assert segments.first_segments.tolist() == [0, 1, 4, 5]
    assert segments.segment_start_loc.tolist() == [0, 1, 17, 33, 41, 49]
    assert states.slots.tolist() == [5, 2, 9, 10]


def test_padding_rows_of_a_graph_have_no_state() -> None:
    slots, ends = np.array([3, 1]), np.array([8, 5])
    rows = pad_rows(slots, ends, 1, 3, [np.array([[4, NO_STATE], [4, 6]])]).reshape(5, 3)
    assert rows.tolist() == [[3, 1, 0], [8, 5, 0], [1, 1, 0], [4, -1, -1], [4, 6, -1]]
