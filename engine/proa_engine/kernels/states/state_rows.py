"""StateRows: where the states of a step's rows are read and written, the same for every recurrent layer. Replay: the
tokens before a row that the row computes again.

StatePlan: the same as indices, for the CPU. The tokens of all rows are computed in steps: step i computes token i of
every row that is so long. Rows are ordered by their length, so the rows of a step are the first ones.
"""

from dataclasses import dataclass
from typing import Final

import torch


@dataclass(frozen=True, slots=True)
class Replay:
    """Which tokens a batch computes again, in an engine with drafts. Tensors are [R] int32.

    A state cannot take back a draft that is rejected. So a row with drafts writes the state before its first token, and
    each recurrent layer keeps what it computes states from, its inputs, by request. Those of accepted tokens are
    pending: the request's next row computes the state behind them first, from the same bits by the same operations in
    the same order. So it reads and writes the state once, and a request needs one slot, however many drafts it has.
    """

    slots: torch.Tensor  # of the requests, by which inputs are kept; padding has any
    num_pending: torch.Tensor  # kept inputs between the state that the row reads and its first token
    num_kept: torch.Tensor  # tokens of the row if it has drafts, and its inputs are kept; 0: it has none
    starts: torch.Tensor  # the row's first token in the batch; those before it are padding
    width: int  # most inputs that are kept for a request
    num_rows: int  # the first rows of the batch, which have at most `width` tokens; the others have nothing pending


class NoReplay:
    """Of an engine without drafts."""

    num_pending = num_kept = starts = None
    width = num_rows = 0


NO_REPLAY: Final = NoReplay()


@dataclass(frozen=True, slots=True)
class StateRows:
    """The rows of a batch, cut into segments: a layer writes the state at the end of each segment to a slot.

    A batch of R rows has S segments with at least one token each, in the order of the rows and without gaps. The first
    segment of a row starts from the state in the slot `read`, each other one from the state at the end of the segment
    before it; the last one ends with the row. Decodes (rows of one token) have one segment, so in a batch of decodes
    the last two tensors equal `AttentionMetadata.query_start_loc`. `read` and `write` of a row may be the same slot,
    but no row reads or writes a slot that another row of the batch writes. A row with drafts has one segment, and
    writes the state before its first token.
    """

    read: torch.Tensor  # [R] int32: slot; -1: the row begins at position 0, its state is zero and nothing is read
    write: torch.Tensor  # [S] int32: slot; -1: padding, written nowhere
    first_segments: torch.Tensor  # [R + 1] int32: row r has segments first_segments[r] … first_segments[r + 1]
    segment_start_loc: torch.Tensor  # [S + 1] int32: segment s has tokens segment_start_loc[s] … [s + 1] of the batch
    replay: Replay | NoReplay = NO_REPLAY


@dataclass(frozen=True, slots=True)
class PendingInputs:
    """What the operations behind the convolution compute again, M tokens: on a CPU the pending ones, row by row; on a
    GPU `Replay.width` of each of `Replay.num_rows` rows, of which the first `num_pending` have a value."""

    convolved: torch.Tensor  # [M, C]
    beside: torch.Tensor  # [M, B]: what the layer keeps beside the convolution's inputs

    def behind(self, convolved: torch.Tensor, beside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs of T tokens, then these: [T + M, C] and [T + M, B]."""
        return torch.cat((convolved, self.convolved)), torch.cat((beside, self.beside))


class NoPendingInputs:
    convolved = beside = None

    def behind(self, convolved: torch.Tensor, beside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return convolved, beside


NO_PENDING: Final = NoPendingInputs()


@dataclass(frozen=True, slots=True)
class Cut:
    """States to write after a step."""

    rows: torch.Tensor | None  # [N] int64: in the plan's order; None: all
    slots: torch.Tensor  # [N] int64

    def write(self, states: torch.Tensor, cache: torch.Tensor) -> None:
        """states [R, ...], cache [slots, ...]"""
        cache.index_copy_(0, self.slots, states if self.rows is None else states.index_select(0, self.rows))


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Places among kept inputs [slots * width], int64."""

    pending: torch.Tensor  # [M]: of the tokens that are computed again, row by row
    tokens: torch.Tensor  # [K]: tokens of the batch whose inputs are kept
    kept: torch.Tensor  # [K]: where

    def exchange(self, inputs: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Keep inputs [T, C] in `kept` [slots, width, C]. Returns those of the pending tokens [M, C], which may be
        overwritten."""
        places = kept.flatten(0, 1)
        pending = places.index_select(0, self.pending)
        places.index_copy_(0, self.kept, inputs.index_select(0, self.tokens))
        return pending


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Computed once a step, used by every recurrent layer. R rows, N tokens, S segments whose states are written.

    The tokens are those of the batch, then the pending ones, row by row. The convolution sees them row by row, with
    K inputs before each row, the state: N + K * R inputs in all. A convolution of kernel size 4 reads K = 3.
    """

    token_order: torch.Tensor  # [N] int64: tokens by step
    row_counts: tuple[int, ...]  # rows of each step
    cuts: dict[int, Cut]  # by step; -1: before the first one
    read: torch.Tensor  # [R] int64: slots, in the plan's order of rows; 0 where nothing is read
    first_rows: torch.Tensor  # int64, in the plan's order: rows that begin at position 0
    conv_states: torch.Tensor  # [R, K] int64: inputs that are states, in the plan's order of rows
    conv_inputs: torch.Tensor  # [N] int64: inputs that are tokens, in their order
    conv_ends: torch.Tensor  # [S, K] int64: the last inputs of each segment
    conv_slots: torch.Tensor  # [S] int64: slots of `conv_ends`
    replay: ReplayPlan | NoReplay


@dataclass(slots=True)
class _Tokens:
    """Tokens by row. Rows behind the first `len(read)` of a batch are padding."""

    row_of: torch.Tensor  # [N] int64
    step_of: torch.Tensor  # [N] int64: place in the row
    lengths: torch.Tensor  # [R] int64
    read: torch.Tensor  # [R] int64
    ends: torch.Tensor  # [S] int64: tokens of the row before the end of each segment


def plan_states(query_start_loc: torch.Tensor, rows: StateRows, num_inputs: int) -> StatePlan:
    """`query_start_loc` as in `AttentionMetadata`; `num_inputs`: before a token, that the convolution reads."""
    starts = query_start_loc.long()
    lengths = starts.diff()
    row_of = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    row_of_segment = torch.repeat_interleave(torch.arange(len(lengths)), rows.first_segments.diff().long())
    ends = rows.segment_start_loc[1:].long() - starts[row_of_segment]
    tokens = _Tokens(row_of, torch.arange(len(row_of)) - starts[row_of], lengths, rows.read.long(), ends)
    replay: ReplayPlan | NoReplay = NO_REPLAY
    if isinstance(rows.replay, Replay):
        replay = _add_pending(tokens, rows.replay, starts, row_of_segment)

    lengths, row_of, step_of = tokens.lengths, tokens.row_of, tokens.step_of
    order = lengths.argsort(descending=True, stable=True)
    rank = order.argsort()
    written = (rows.write >= 0).nonzero().flatten()
    ends, slots, segment_rows = tokens.ends[written], rows.write[written].long(), row_of_segment[written]
    cuts: dict[int, list[tuple[int, int]]] = {}
    for step, row, slot in zip((ends - 1).tolist(), rank[segment_rows].tolist(), slots.tolist(), strict=True):
        cuts.setdefault(step, []).append((row, slot))
    slots_read = tokens.read[order]
    first_inputs = (
        lengths.cumsum(0) - lengths + num_inputs * torch.arange(len(lengths))
    )  # of each row, its state included
    before = torch.arange(num_inputs)
    return StatePlan(
        token_order=(step_of * len(lengths) + rank[row_of]).argsort(),
        row_counts=tuple(step_of.bincount().tolist()),
        cuts={step: _cut(pairs, len(lengths)) for step, pairs in cuts.items()},
        read=slots_read.clamp(min=0),
        first_rows=(slots_read < 0).nonzero().flatten(),
        conv_states=first_inputs[order, None] + before,
        conv_inputs=first_inputs[row_of] + num_inputs + step_of,
        conv_ends=(first_inputs[segment_rows] + ends)[:, None] + before,
        conv_slots=slots,
        replay=replay,
    )


def _add_pending(tokens: _Tokens, replay: Replay, starts: torch.Tensor, row_of_segment: torch.Tensor) -> ReplayPlan:
    """Put the pending tokens before those of their rows, and padding into rows of its own, which begin at position 0
    and write no state. A row with drafts ends its segment behind its pending tokens."""
    pending, slots = replay.num_pending.long(), replay.slots.long()
    padding = replay.starts.long() - starts[:-1]
    padded, again = padding.nonzero().flatten(), torch.repeat_interleave(torch.arange(len(pending)), pending)
    index = torch.arange(len(again)) - (pending.cumsum(0) - pending)[again]  # among the pending tokens of the row
    is_padding = tokens.step_of < padding[tokens.row_of]
    shift = pending - padding
    row_of_padding = len(pending) + torch.searchsorted(padded, tokens.row_of)
    tokens.step_of += torch.where(is_padding, 0, shift[tokens.row_of])
    is_kept = (replay.num_kept > 0)[tokens.row_of] & ~is_padding
    kept_tokens = is_kept.nonzero().flatten()
    kept_rows = tokens.row_of[kept_tokens]
    kept = slots[kept_rows] * replay.width + tokens.step_of[kept_tokens] - pending[kept_rows]
    tokens.row_of = torch.cat((torch.where(is_padding, row_of_padding, tokens.row_of), again))
    tokens.step_of = torch.cat((tokens.step_of, index))
    tokens.lengths = torch.cat((tokens.lengths + shift, padding[padded]))
    tokens.read = torch.cat((tokens.read, torch.full_like(padded, -1)))
    has_drafts = (replay.num_kept > 0)[row_of_segment]
    tokens.ends = torch.where(has_drafts, pending[row_of_segment], tokens.ends + shift[row_of_segment])
    return ReplayPlan(slots[again] * replay.width + index, kept_tokens, kept)


def _cut(pairs: list[tuple[int, int]], num_rows: int) -> Cut:
    """`pairs` of rows and slots, one for a row at most."""
    pairs.sort()
    rows, slots = torch.tensor(pairs).unbind(1)
    return Cut(None if len(pairs) == num_rows else rows, slots)


def read_states(cache: torch.Tensor, plan: StatePlan) -> torch.Tensor:
    """The states [R, ...] of a cache [slots, ...] before the step, in the plan's order of rows."""
    return cache.index_select(0, plan.read).index_fill_(0, plan.first_rows, 0)
