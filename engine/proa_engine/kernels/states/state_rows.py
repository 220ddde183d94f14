"""StateRows: where the states of a step's rows are read and written, the same for every recurrent layer.

StatePlan: the same as indices, for the CPU. The tokens of all rows are computed in steps: step i computes token i of
every row that is so long. Rows are ordered by their length, so the rows of a step are the first ones.
"""

from dataclasses import dataclass

import torch

TAPS = 3  # inputs before a token that the convolution reads


@dataclass(frozen=True, slots=True)
class StateRows:
    """The rows of a batch, cut into segments: a layer writes the state at the end of each segment to a slot.

    A batch of R rows has S segments with at least one token each, in the order of the rows and without gaps. The first
    segment of a row starts from the state in the slot `read`, each other one from the state at the end of the segment
    before it; the last one ends with the row. Decodes (rows of one token) have one segment, so in a batch of decodes
    the last two tensors equal `AttentionMetadata.query_start_loc`. `read` and `write` of a row may be the same slot,
    but no row reads or writes a slot that another row of the batch writes.
    """

    read: torch.Tensor  # [R] int32: slot; -1: the row begins at position 0, its state is zero and nothing is read
    write: torch.Tensor  # [S] int32: slot; -1: padding, written nowhere
    first_segments: torch.Tensor  # [R + 1] int32: row r has segments first_segments[r] … first_segments[r + 1]
    segment_start_loc: torch.Tensor  # [S + 1] int32: segment s has tokens segment_start_loc[s] … [s + 1] of the batch


@dataclass(frozen=True, slots=True)
class Cut:
    """States to write after a step."""

    rows: torch.Tensor | None  # [N] int64: in the plan's order; None: all
    slots: torch.Tensor  # [N] int64

    def write(self, states: torch.Tensor, cache: torch.Tensor) -> None:
        """states [R, ...], cache [slots, ...]"""
        cache.index_copy_(0, self.slots, states if self.rows is None else states.index_select(0, self.rows))


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Computed once a step, used by every recurrent layer. R rows, T tokens, S segments whose states are written.

    The convolution sees the batch with `TAPS` inputs before each row, the state: T + TAPS * R inputs in all.
    """

    token_order: torch.Tensor  # [T] int64: tokens by step
    row_counts: tuple[int, ...]  # rows of each step
    cuts: dict[int, Cut]  # by step
    read: torch.Tensor  # [R] int64: slots, in the plan's order of rows; 0 where nothing is read
    first_rows: torch.Tensor | None  # int64, in the plan's order: rows that begin at position 0; None: none does
    conv_states: torch.Tensor  # [R, TAPS] int64: inputs that are states, in the plan's order of rows
    conv_inputs: torch.Tensor  # [T] int64: inputs that are tokens, in the order of the batch
    conv_ends: torch.Tensor  # [S, TAPS] int64: the last inputs of each segment
    conv_slots: torch.Tensor  # [S] int64: slots of `conv_ends`


def plan_states(query_start_loc: torch.Tensor, rows: StateRows) -> StatePlan:
    """`query_start_loc` as in `AttentionMetadata`."""
    starts = query_start_loc.long()
    lengths = starts.diff()
    order = lengths.argsort(descending=True, stable=True)
    rank = order.argsort()
    row_of = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    tokens = torch.arange(len(row_of))
    step_of = tokens - starts[row_of]
    token_order = (step_of * len(lengths) + rank[row_of]).argsort()
    taps = torch.arange(TAPS)

    ends, slots = rows.segment_start_loc[1:].long(), rows.write.long()
    row_of_segment = torch.repeat_interleave(torch.arange(len(lengths)), rows.first_segments.diff().long())
    written = (slots >= 0).nonzero().flatten()
    ends, slots, segment_rows = ends[written], slots[written], row_of_segment[written]
    cuts: dict[int, list[tuple[int, int]]] = {}
    for step, row, slot in zip(
        (ends - starts[segment_rows] - 1).tolist(), rank[segment_rows].tolist(), slots.tolist(), strict=True
    ):
        cuts.setdefault(step, []).append((row, slot))
    slots_read = rows.read[order].long()
    first_rows = (slots_read < 0).nonzero().flatten()
    return StatePlan(
        token_order=token_order,
        row_counts=tuple(step_of.bincount().tolist()),
        cuts={step: _cut(pairs, len(lengths)) for step, pairs in cuts.items()},
        read=slots_read.clamp(min=0),
        first_rows=first_rows if len(first_rows) else None,
        conv_states=(starts[:-1] + TAPS * torch.arange(len(lengths)))[order, None] + taps,
        conv_inputs=tokens + TAPS * (row_of + 1),
        conv_ends=(ends + TAPS * segment_rows)[:, None] + taps,
        conv_slots=slots,
    )


def _cut(pairs: list[tuple[int, int]], num_rows: int) -> Cut:
    """`pairs` of rows and slots, one for a row at most."""
    pairs.sort()
    rows, slots = torch.tensor(pairs).unbind(1)
    return Cut(None if len(pairs) == num_rows else rows, slots)


def read_states(cache: torch.Tensor, plan: StatePlan) -> torch.Tensor:
    """The states [R, ...] of a cache [slots, ...] before the step, in the plan's order of rows."""
    states = cache.index_select(0, plan.read)
    if plan.first_rows is not None:
        states.index_fill_(0, plan.first_rows, 0)
    return states
