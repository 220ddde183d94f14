"""The segments of a step's rows and the slots that they read and write."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from proa_engine.core.types import NO_STATE, NO_STATES, StateSteps
from proa_engine.kernels.states.state_rows import Replay
from proa_engine.layers.attention_metadata import AttentionMetadata
from proa_engine.step.columns import ForwardInputs, Rows
from proa_engine.step.decode_graphs import pad_rows
from proa_engine.step.slots import SlotTables
from proa_engine.step.staging import Packer, Staging
from proa_engine.step.states import StateColumns


def make_states() -> StateColumns:
    tables = SlotTables(max_num_seqs=4, max_model_len=64, block_size=4, vocab_size=9, device=torch.device("cpu"))
    states = StateColumns(tables)
    states.slots[:] = [7, 8, 9, 10]
    return states


def rows_of(
    slots: dict[str, int],
    starts: list[int],
    ends: list[int],
    states: Mapping[str, StateSteps] = NO_STATES,
    num_samples: Sequence[int] = (),
) -> Rows:
    first, last = np.array(starts), np.array(ends)
    starts_of_rows = np.concatenate(([0], np.cumsum(last - first)))
    samples_of_rows = np.array(num_samples or [0] * len(first))
    slots_of_rows = np.array(list(slots.values()))
    return Rows(list(slots), slots_of_rows, first, last, last - first, samples_of_rows, starts_of_rows, states)


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


def replay(columns: StateColumns, rows: Rows, true_ends: list[int]) -> Replay:
    """What the step computes again, on a device that knows the rows' true ends."""
    packer = Packer()
    inputs = columns.lay_out(rows, packer)
    starts = torch.from_numpy(rows.query_start_loc).int()
    metadata = AttentionMetadata(starts, torch.tensor(true_ends, dtype=torch.int32), tables=(), num_decodes=0)
    none = torch.empty(0)
    inputs.fill(ForwardInputs(none, none, metadata), Staging(torch.device("cpu")).ship(packer.pack()))
    assert metadata.states is not None
    assert isinstance(metadata.states.replay, Replay)
    return metadata.states.replay


def test_k_falls_to_zero_with_tokens_pending() -> None:
    tables = SlotTables(max_num_seqs=4, max_model_len=64, block_size=4, vocab_size=9, device=torch.device("cpu"))
    columns = StateColumns(tables, num_kept=4)
    slots = {"a": 2}
    steps = [  # start and end as the host plans them, samples, true end; pending and kept tokens
        (0, 5, 1, 5, 0, 0),  # the prompt
        (5, 9, 4, 9, 0, 4),  # three drafts, two of which are accepted
        (9, 10, 1, 9, 3, 0),  # no room for drafts: the state is written behind all
        (10, 14, 4, 13, 0, 4),  # all three are rejected
        (11, 13, 2, 12, 1, 2),  # the draft is accepted
        (13, 17, 4, 16, 2, 4),
    ]
    for start, end, num_samples, true_end, num_pending, num_kept in steps:
        rows = rows_of(slots, [start], [end], num_samples=[num_samples])
        found = replay(columns, rows, [true_end])
        assert (found.num_pending.tolist(), found.num_kept.tolist()) == ([num_pending], [num_kept])
        assert found.num_rows == (start > 0)


def test_rows_with_drafts_and_decodes_come_before_those_of_prompts() -> None:
    tables = SlotTables(max_num_seqs=4, max_model_len=64, block_size=4, vocab_size=9, device=torch.device("cpu"))
    rows = rows_of({"a": 2, "b": 0, "c": 1}, [7, 5, 0], [8, 8, 30], num_samples=[1, 3, 0])
    found = replay(StateColumns(tables, num_kept=4), rows, [8, 8, 30])
    assert (found.num_rows, found.width) == (2, 4)
    assert found.slots.tolist() == [2, 0, 1]
    assert found.starts.tolist() == [0, 1, 4]
