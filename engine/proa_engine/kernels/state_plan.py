"""The states of a step's rows as indices, for the CPU.

The tokens of all rows are computed in steps: step i computes token i of every row that is so long. Rows are ordered by
their length, so the rows of a step are the first ones.
"""

from dataclasses import dataclass

import torch

from proa_engine.kernels.state_rows import StateRows

TAPS = 3  # inputs before a token that the convolution reads


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
