"""Batches of an engine with drafts, whose rows have pending tokens, with results computed naively in float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proa_engine.kernels.states.conv_weights import ConvWeights
from proa_engine.kernels.states.delta_rule import gated_delta_rule
from proa_engine.kernels.states.short_conv import short_conv
from proa_engine.kernels.states.state_rows import PendingInputs, Replay, StateRows, plan_states
from support.state_cases import NUM_SLOTS, OF_DELTA_NETS, ConvKind, naive_conv, naive_delta_rule, states_of

WIDTH = 5  # of kept inputs
BESIDE = 3


@dataclass(frozen=True, slots=True)
class ReplayRow:
    num_tokens: int
    num_pending: int = 0
    has_drafts: bool = False
    has_state: bool = True
    in_place: bool = True  # it writes the slot that it reads
    padding: int = 0


DECODES = (
    ReplayRow(5, 3, True),
    ReplayRow(1, 5, padding=4),
    ReplayRow(1, padding=4),
    ReplayRow(3, 1, True, padding=2),
    ReplayRow(2, 0, True, in_place=False, padding=3),
    ReplayRow(4, 0, True, has_state=False, in_place=False, padding=1),
    ReplayRow(0, has_state=False, in_place=False, padding=5),
)
MIXED = (
    ReplayRow(1),
    ReplayRow(1, 4),
    ReplayRow(5, 5, True),
    ReplayRow(2, 2, True),
    ReplayRow(3, 0, True, in_place=False),
    ReplayRow(41, in_place=False),
    ReplayRow(7, has_state=False, in_place=False),
)
BATCHES = {"decodes": DECODES, "mixed": MIXED}


@dataclass(frozen=True, slots=True)
class ReplayBatch:
    rows: Sequence[ReplayRow]
    query_start_loc: Tensor
    states: StateRows

    @property
    def replay(self) -> Replay:
        assert isinstance(self.states.replay, Replay)
        return self.states.replay

    def own(self, row: int) -> slice:
        start = int(self.replay.starts[row])
        return slice(start, start + self.rows[row].num_tokens)


def batch_of(rows: Sequence[ReplayRow]) -> ReplayBatch:
    """Slots are drawn at random. Rows of up to `WIDTH` tokens come first."""
    free, starts, read, write = torch.randperm(NUM_SLOTS).tolist(), [0], list[int](), list[int]()
    for row in rows:
        read.append(free.pop() if row.has_state else -1)
        write.append(read[-1] if row.in_place else free.pop() if row.num_tokens else -1)
        starts.append(starts[-1] + row.padding + row.num_tokens)

    def column(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    replay = Replay(
        slots=torch.randperm(len(rows)).int(),
        num_pending=column([row.num_pending for row in rows]),
        num_kept=column([row.num_tokens if row.has_drafts else 0 for row in rows]),
        starts=column([start + row.padding for start, row in zip(starts, rows, strict=False)]),
        width=WIDTH,
        num_rows=sum(row.num_tokens <= WIDTH for row in rows),
    )
    query_start_loc = column(starts)
    states = StateRows(column(read), column(write), column(range(len(rows) + 1)), query_start_loc, replay)
    return ReplayBatch(rows, query_start_loc, states)


@dataclass(slots=True)
class Results:
    """All float32 but the cache."""

    out: Tensor  # [T, …], zero in padding
    cache: Tensor
    pending: list[Tensor]  # of each row [num_pending, …], where the operation has one


Naive = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Inputs [tokens, …] and a state in float64 -> outputs and the state behind them."""


def compute_naively(batch: ReplayBatch, cache: Tensor, pending: Sequence[Tensor], own: Tensor, naive: Naive) -> Results:
    """`pending` are the rows' pending inputs, `own` [T, …] those of the batch."""
    cache, outs, of_pending = cache.clone(), list[Tensor](), list[Tensor]()
    writes: list[tuple[int, Tensor]] = []
    for index, row in enumerate(batch.rows):
        slot = int(batch.states.read[index])
        state = torch.zeros_like(cache[0]) if slot < 0 else cache[slot]
        again, state = naive(pending[index].double(), state.double())
        of_pending.append(again.float())
        out, behind = naive(own[batch.own(index)].double(), state)
        outs += [torch.zeros(row.padding, *out.shape[1:]), out.float()]
        writes.append((int(batch.states.write[index]), state if row.has_drafts else behind))
    for slot, state in writes:
        if slot >= 0:
            cache[slot] = state.to(cache.dtype)
    return Results(torch.cat(outs), cache, of_pending)


def rows_of(batch: ReplayBatch, values: Tensor, *, on_cpu: bool) -> list[Tensor]:
    """The parts of a field of `PendingInputs`, by row."""
    counts = [row.num_pending for row in batch.rows]
    if on_cpu:
        return list(values.split(counts))
    rows = values.view(batch.replay.num_rows, WIDTH, -1)
    return [rows[index, :count] if index < len(rows) else values[:0] for index, count in enumerate(counts)]


def as_pending(batch: ReplayBatch, by_row: Sequence[Tensor], *, on_cpu: bool) -> Tensor:
    """The values of each row as a field of `PendingInputs` has them, NaN where there are none."""
    if on_cpu:
        return torch.cat(list(by_row))
    again = by_row[0].new_full((batch.replay.num_rows, WIDTH, by_row[0].shape[1]), torch.nan)
    for row, values in enumerate(by_row[: batch.replay.num_rows]):
        again[row, : len(values)] = values
    return again.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class ConvReplay:
    batch: ReplayBatch
    x: Tensor
    beside: Tensor
    weights: ConvWeights
    cache: Tensor
    kept: tuple[Tensor, Tensor]
    expected: Results

    def check(self, *, on_cpu: bool, tolerance: float) -> None:
        batch, cache, kept = self.batch, self.cache.clone(), [each.clone() for each in self.kept]
        out, pending = short_conv(
            self.x,
            self.beside,
            self.weights,
            cache,
            kept,
            batch.query_start_loc,
            batch.states,
            num_decodes=0,
            plan=plan_states(batch.query_start_loc, batch.states, self.weights.num_before) if on_cpu else None,
        )
        assert isinstance(pending, PendingInputs)
        assert not out.isnan().any(), "padding has numbers"
        close(out[self._own], self.expected.out[self._own], tolerance)
        torch.testing.assert_close(cache, self.expected.cache, rtol=0, atol=0, equal_nan=True)
        convolved = rows_of(batch, pending.convolved, on_cpu=on_cpu)
        beside = rows_of(batch, pending.beside, on_cpu=on_cpu)
        for row, slot in enumerate(batch.replay.slots.tolist()):
            count = batch.rows[row].num_pending
            close(convolved[row], self.expected.pending[row], tolerance)
            assert torch.equal(beside[row], self.kept[1][slot, :count])
            for before, after, own in zip(self.kept, kept, (self.x, self.beside), strict=True):
                num_kept = int(batch.replay.num_kept[row])
                assert torch.equal(after[slot, :num_kept], own[batch.own(row)][:num_kept])
                torch.testing.assert_close(
                    after[slot, num_kept:], before[slot, num_kept:], rtol=0, atol=0, equal_nan=True
                )

    @property
    def _own(self) -> Tensor:
        """Tokens that are not padding, whose results have no meaning."""
        return torch.cat([torch.arange(len(self.x))[self.batch.own(row)] for row in range(len(self.batch.rows))])


def conv_replay(
    rows: Sequence[ReplayRow], channels: int, dtype: torch.dtype, kind: ConvKind = OF_DELTA_NETS
) -> ConvReplay:
    batch = batch_of(rows)
    num_tokens = int(batch.query_start_loc[-1])
    x = torch.randn(num_tokens, channels + 7).to(dtype)[:, 3:-4]
    beside = torch.randn(num_tokens, BESIDE + 2).to(dtype)[:, 1:-1]
    weights = kind.weights(channels, dtype)
    cache = states_of(batch.states, (channels, weights.num_before), dtype)
    kept = torch.full((len(rows), WIDTH, channels + BESIDE), torch.nan, dtype=dtype)
    for row, slot in enumerate(batch.replay.slots.tolist()):
        count = rows[row].num_pending
        kept[slot, :count] = torch.randn(count, channels + BESIDE).to(dtype)
    kept_x, kept_beside = kept[..., :channels].contiguous(), kept[..., channels:].contiguous()
    pending = [kept_x[slot, : row.num_pending] for row, slot in zip(rows, batch.replay.slots.tolist(), strict=True)]

    def naive(inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if not len(inputs):
            return inputs, state
        inputs = torch.cat((state, inputs.T), dim=1)
        return naive_conv(inputs, weights), inputs[:, -weights.num_before :]

    expected = compute_naively(batch, cache, pending, x, naive)
    return ConvReplay(batch, x, beside, weights, cache, (kept_x, kept_beside), expected)


@dataclass(frozen=True, slots=True)
class DeltaReplay:
    batch: ReplayBatch
    qkv: Tensor
    gates: Tensor
    a_log: Tensor
    dt_bias: Tensor
    cache: Tensor
    pending: list[Tensor]  # by row: qkv, then gates
    expected: Results

    def compute(self, *, on_cpu: bool, batch_invariant: bool = False) -> tuple[Tensor, Tensor]:
        """The output, and the cache after the step."""
        batch, cache, width = self.batch, self.cache.clone(), self.qkv.shape[1]
        again = as_pending(batch, self.pending, on_cpu=on_cpu)
        out = gated_delta_rule(
            self.qkv,
            self.gates,
            self.a_log,
            self.dt_bias,
            cache,
            batch.query_start_loc,
            batch.states,
            pending=PendingInputs(again[:, :width].contiguous(), again[:, width:].contiguous()),
            num_decodes=0,
            batch_invariant=batch_invariant,
            plan=plan_states(batch.query_start_loc, batch.states, 3) if on_cpu else None,
        )
        return out, cache

    def check(self, *, on_cpu: bool, tolerance: float, batch_invariant: bool = False) -> None:
        out, cache = self.compute(on_cpu=on_cpu, batch_invariant=batch_invariant)
        assert not out.isnan().any(), "padding has numbers"
        for row in range(len(self.batch.rows)):
            close(out[self.batch.own(row)], self.expected.out[self.batch.own(row)], tolerance)
        torch.testing.assert_close(cache, self.expected.cache, rtol=tolerance, atol=tolerance, equal_nan=True)


def delta_replay(
    rows: Sequence[ReplayRow], *, key_heads: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> DeltaReplay:
    batch = batch_of(rows)
    num_tokens, width = int(batch.query_start_loc[-1]), 2 * key_heads * key_dim + heads * value_dim
    inputs = torch.randn(num_tokens, width + 2 * heads).to(dtype)
    pending = [torch.randn(row.num_pending, width + 2 * heads).to(dtype) for row in rows]
    a_log, dt_bias = torch.empty(heads).uniform_(0.01, 16).log(), torch.randn(heads)
    cache = states_of(batch.states, (heads, value_dim, key_dim), torch.float32)

    def naive(both: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if not len(both):
            return torch.zeros(0, heads * value_dim), state
        return naive_delta_rule(both[:, :width], both[:, width:], a_log, dt_bias, state)

    expected = compute_naively(batch, cache, pending, inputs, naive)
    return DeltaReplay(batch, inputs[:, :width], inputs[:, width:], a_log, dt_bias, cache, pending, expected)


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(ours.float(), theirs, rtol=tolerance, atol=tolerance)
