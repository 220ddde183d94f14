"""Batches of rows with states, cut into segments, with expected outputs and states computed naively in float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from proa_engine.kernels.states.conv_weights import ConvWeights
from proa_engine.kernels.states.delta_rule import gated_delta_rule
from proa_engine.kernels.states.short_conv import short_conv
from proa_engine.kernels.states.state_rows import NO_PENDING, StateRows, plan_states

NUM_SLOTS = 40


@dataclass(frozen=True, slots=True)
class Row:
    segments: tuple[int, ...]  # tokens of each
    has_state: bool = True
    in_place: bool = False  # the last segment writes the slot that the row reads
    is_padding: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    query_start_loc: Tensor
    states: StateRows
    num_decodes: int
    row_segments: list[list[int]]  # lengths

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_loc[-1])


def batch_of(rows: Sequence[Row]) -> Batch:
    """Decodes must come first. Slots are drawn at random."""
    free = torch.randperm(NUM_SLOTS).tolist()
    starts, first_segments, segment_starts, read, write = [0], [0], [0], [], []
    for row in rows:
        read.append(free.pop() if row.has_state else -1)
        for length in row.segments:
            segment_starts.append(segment_starts[-1] + length)
            write.append(-1 if row.is_padding else free.pop())
        if row.in_place:
            write[-1] = read[-1]
        starts.append(segment_starts[-1])
        first_segments.append(len(write))
    num_decodes = next((i for i, row in enumerate(rows) if row.segments != (1,)), len(rows))
    tensors = [torch.tensor(each, dtype=torch.int32) for each in (read, write, first_segments, segment_starts)]
    return Batch(
        torch.tensor(starts, dtype=torch.int32),
        StateRows(tensors[0], tensors[1], tensors[2], tensors[3]),
        num_decodes,
        [[*row.segments] for row in rows],
    )


def states_of(rows: StateRows, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """A cache with NaN where nothing is read."""
    cache = torch.full((NUM_SLOTS, *shape), torch.nan, dtype=dtype)
    for slot in rows.read.tolist():
        if slot >= 0:
            cache[slot] = torch.randn(*shape).to(dtype)
    return cache


def compute_naively(
    batch: Batch, cache: Tensor, naive: Callable[[slice, Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """All outputs in float32, and the cache after the step. `naive`: the tokens of a segment and the state before them
    in float64 -> their outputs and the state behind them."""
    after, outs, start, writes = cache.clone(), [], 0, iter(batch.states.write.tolist())
    for slot, lengths in zip(batch.states.read.tolist(), batch.row_segments, strict=True):
        state = torch.zeros_like(cache[0], dtype=torch.float64) if slot < 0 else cache[slot].double()
        for length in lengths:
            out, state = naive(slice(start, start + length), state)
            outs.append(out.float())
            start, write = start + length, next(writes)
            if write >= 0:
                after[write] = state.to(cache.dtype)
    return torch.cat(outs), after


MIXED = (
    Row((1,)),
    Row((1,), in_place=True),
    Row((1,), has_state=False),
    Row((5,), has_state=False),
    Row((2, 1, 4), in_place=True),
    Row((64, 3)),
    Row((70, 1)),
    Row((3,), in_place=True),
)
SHORT = (*MIXED[:5], MIXED[-1])
DECODES = (Row((1,)), Row((1,), in_place=True), Row((1,), has_state=False), Row((1,), has_state=False, is_padding=True))
LONG = (Row((150, 17), has_state=False),)
BATCHES = {"mixed": MIXED, "decodes": DECODES, "long": LONG}
ROWS = {"short": SHORT, **BATCHES}


@dataclass(frozen=True, slots=True)
class ConvCase:
    batch: Batch
    x: Tensor  # [T, C], a view of wider rows
    weights: ConvWeights
    cache: Tensor  # NaN where nothing is read
    expected: Tensor  # [T, C] float32
    expected_cache: Tensor

    def compute(self, *, on_cpu: bool) -> tuple[Tensor, Tensor]:
        """The output, and the cache after the step."""
        cache, batch = self.cache.clone(), self.batch
        plan = plan_states(batch.query_start_loc, batch.states, self.weights.num_before) if on_cpu else None
        out, _ = short_conv(
            self.x,
            self.x,
            self.weights,
            cache,
            (),
            batch.query_start_loc,
            batch.states,
            num_decodes=batch.num_decodes,
            plan=plan,
        )
        return out, cache

    def check(self, *, on_cpu: bool, tolerance: float) -> None:
        out, cache = self.compute(on_cpu=on_cpu)
        assert out.dtype == self.x.dtype
        torch.testing.assert_close(out.float(), self.expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(cache, self.expected_cache, rtol=0, atol=0, equal_nan=True)


@dataclass(frozen=True, slots=True)
class ConvKind:
    kernel_size: int = 4
    bias: bool = False
    silu: bool = True

    def weights(self, channels: int, dtype: torch.dtype) -> ConvWeights:
        weight, bias = torch.randn(channels, self.kernel_size).to(dtype), torch.randn(channels).to(dtype)
        return ConvWeights(weight, bias if self.bias else None, self.silu)


OF_DELTA_NETS = ConvKind()
CONVS = {
    "delta nets": OF_DELTA_NETS,
    "Mamba2": ConvKind(bias=True),
    "LFM2": ConvKind(kernel_size=3, silu=False),
    "three with a bias": ConvKind(kernel_size=3, bias=True),
}


def naive_conv(inputs: Tensor, weights: ConvWeights) -> Tensor:
    """inputs [C, K - 1 + T], those before the tokens first -> [T, C] float64"""
    kernel_size = weights.weight.shape[1]
    total = (inputs.unfold(1, kernel_size, 1) * weights.weight.double()[:, None]).sum(2).T
    if weights.bias is not None:
        total = total + weights.bias.double()
    return F.silu(total) if weights.silu else total


def conv_case(rows: Sequence[Row], channels: int, dtype: torch.dtype, kind: ConvKind = OF_DELTA_NETS) -> ConvCase:
    batch = batch_of(rows)
    x = torch.randn(batch.num_tokens, channels + 7).to(dtype)[:, 3:-4]
    weights = kind.weights(channels, dtype)
    cache = states_of(batch.states, (channels, weights.num_before), dtype)

    def naive(tokens: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        inputs = torch.cat((state, x[tokens].double().T), dim=1)
        return naive_conv(inputs, weights), inputs[:, -weights.num_before :]

    return ConvCase(batch, x, weights, cache, *compute_naively(batch, cache, naive))


@dataclass(frozen=True, slots=True)
class DeltaCase:
    batch: Batch
    qkv: Tensor
    gates: Tensor  # a view of wider rows
    a_log: Tensor
    dt_bias: Tensor
    cache: Tensor  # NaN where nothing is read
    expected: Tensor  # [T, heads * value_dim] float32
    expected_cache: Tensor

    def compute(self, *, on_cpu: bool, batch_invariant: bool = False) -> tuple[Tensor, Tensor]:
        """The output, and the cache after the step."""
        cache, batch = self.cache.clone(), self.batch
        plan = plan_states(batch.query_start_loc, batch.states, 3) if on_cpu else None
        out = gated_delta_rule(
            self.qkv,
            self.gates,
            self.a_log,
            self.dt_bias,
            cache,
            batch.query_start_loc,
            batch.states,
            pending=NO_PENDING,
            num_decodes=batch.num_decodes,
            batch_invariant=batch_invariant,
            plan=plan,
        )
        return out, cache

    def check(
        self, *, on_cpu: bool, tolerance: float, batch_invariant: bool = False, cache_tolerance: float | None = None
    ) -> None:
        """`cache_tolerance`: another for the states, which are float32."""
        out, cache = self.compute(on_cpu=on_cpu, batch_invariant=batch_invariant)
        assert out.dtype == self.qkv.dtype
        torch.testing.assert_close(out.float(), self.expected, rtol=tolerance, atol=tolerance)
        tolerance = cache_tolerance or tolerance
        torch.testing.assert_close(cache, self.expected_cache, rtol=tolerance, atol=tolerance, equal_nan=True)


def delta_case(
    rows: Sequence[Row],
    *,
    key_heads: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    similar: bool = False,
) -> DeltaCase:
    """`similar`: keys that hardly differ, beta near 1 and little decay, which is worst for the chunked form."""
    batch = batch_of(rows)
    num_tokens = batch.num_tokens
    qkv = torch.randn(num_tokens, 2 * key_heads * key_dim + heads * value_dim)
    gates = torch.randn(num_tokens, 2 * heads + 5)
    if similar:
        keys = slice(key_heads * key_dim, 2 * key_heads * key_dim)
        qkv[:, keys] = qkv[:1, keys] + 0.05 * qkv[:, keys]
        gates[:, 2 : 2 + heads] += 4.0
        gates[:, 2 + heads :] -= 6.0
    qkv, gates = qkv.to(dtype), gates.to(dtype)[:, 2:-3]
    a_log, dt_bias = torch.empty(heads).uniform_(0.01, 16).log(), torch.randn(heads)
    cache = states_of(batch.states, (heads, value_dim, key_dim))

    def naive(tokens: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        return naive_delta_rule(qkv[tokens].double(), gates[tokens].double(), a_log, dt_bias, state)

    return DeltaCase(batch, qkv, gates, a_log, dt_bias, cache, *compute_naively(batch, cache, naive))


def naive_delta_rule(
    qkv: Tensor, gates: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One sequence, as the formulas of `delta_rule_reference` say. Returns the output and the last state."""
    heads, value_dim, key_dim = state.shape
    value_width = heads * value_dim
    key_width = (qkv.shape[1] - value_width) // 2
    query, key, value = qkv.split((key_width, key_width, value_width), 1)
    b, a = gates.chunk(2, 1)
    beta, decay = b.sigmoid(), (-a_log.double().exp() * F.softplus(a + dt_bias.double())).exp()
    group = heads // (key_width // key_dim)
    rows = []
    for t in range(len(qkv)):
        q, k = (each[t].view(-1, key_dim).repeat_interleave(group, 0) for each in (query, key))
        q, k = (each / (each.square().sum(1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        state = state * decay[t, :, None, None]
        change = (value[t].view(heads, value_dim) - torch.einsum("hvk,hk->hv", state, k)) * beta[t, :, None]
        state = state + change[:, :, None] * k[:, None]
        rows.append(torch.einsum("hvk,hk->hv", state, q).flatten() * key_dim**-0.5)
    return torch.stack(rows), state
