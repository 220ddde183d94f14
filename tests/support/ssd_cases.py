"""Batches of Mamba2's state space, with expected outputs and states computed naively in float64."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from proa_engine.kernels.states.ssd import ssd
from proa_engine.kernels.states.ssd_recurrent import SsdWeights
from proa_engine.kernels.states.state_rows import NO_PENDING, PendingInputs, plan_states
from support import replay_cases
from support.replay_cases import ReplayBatch, ReplayRow, Results, close
from support.state_cases import Batch, Row, batch_of, compute_naively, states_of

NUM_CONV_INPUTS = 3  # of the plan, which the state space does not read


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdShape:
    heads: int
    groups: int
    head_dim: int
    state_size: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim + 2 * self.groups * self.state_size

    @property
    def state(self) -> tuple[int, int, int]:
        return self.heads, self.head_dim, self.state_size

    def weights(self, decay: float = 1.0) -> SsdWeights:
        """`decay`: a factor of the rates."""
        rates = torch.empty(self.heads).uniform_(0.01, 16) * decay
        return SsdWeights(rates.log(), torch.randn(self.heads) - 2, torch.randn(self.heads), (0.002, 1.5))


SHAPES = [
    SsdShape(heads=4, groups=2, head_dim=16, state_size=16),
    SsdShape(heads=3, groups=1, head_dim=36, state_size=20),
]


def naive_ssd(xbc: Tensor, dt: Tensor, weights: SsdWeights, state: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence, as the formulas of `ssd_recurrent` say. Returns the output and the last state."""
    heads, head_dim, state_size = state.shape
    width = heads * head_dim
    if not len(xbc):
        return torch.zeros(0, width), state
    x, b, c = xbc.split((width, *[(xbc.shape[1] - width) // 2] * 2), 1)
    steps = F.softplus(dt + weights.dt_bias.double()).clamp(*weights.limit)
    decays = (-weights.a_log.double().exp() * steps).exp()
    rows = []
    for t in range(len(xbc)):
        values = x[t].view(heads, head_dim)
        of_heads = [each[t].view(-1, state_size) for each in (b, c)]
        inputs, outputs = (each.repeat_interleave(heads // len(each), 0) for each in of_heads)
        state = state * decays[t, :, None, None] + (values * steps[t, :, None])[..., None] * inputs[:, None]
        rows.append((torch.einsum("hpn,hn->hp", state, outputs) + values * weights.d.double()[:, None]).flatten())
    return torch.stack(rows), state


@dataclass(frozen=True, slots=True)
class SsdCase:
    batch: Batch
    xbc: Tensor  # views of wider rows, as is `dt`
    dt: Tensor
    weights: SsdWeights
    cache: Tensor  # NaN where nothing is read
    expected: Tensor  # [T, heads * head_dim] float32
    expected_cache: Tensor

    def compute(self, *, on_cpu: bool, batch_invariant: bool = False) -> tuple[Tensor, Tensor]:
        """The output, and the cache after the step."""
        cache, batch = self.cache.clone(), self.batch
        out = ssd(
            self.xbc,
            self.dt,
            self.weights,
            cache,
            batch.query_start_loc,
            batch.states,
            pending=NO_PENDING,
            num_decodes=batch.num_decodes,
            batch_invariant=batch_invariant,
            plan=plan_states(batch.query_start_loc, batch.states, NUM_CONV_INPUTS) if on_cpu else None,
        )
        return out, cache

    def check(self, *, on_cpu: bool, tolerance: float, **options: Any) -> None:
        out, cache = self.compute(on_cpu=on_cpu, **options)
        assert out.dtype == self.xbc.dtype
        close(out, self.expected, tolerance)
        torch.testing.assert_close(cache, self.expected_cache, rtol=tolerance, atol=tolerance, equal_nan=True)


def ssd_case(rows: Sequence[Row], shape: SsdShape, dtype: torch.dtype, *, decay: float = 1.0) -> SsdCase:
    batch, weights = batch_of(rows), shape.weights(decay)
    inputs = torch.randn(batch.num_tokens, shape.width + shape.heads + 5).to(dtype)
    xbc, dt = inputs[:, 2 : 2 + shape.width], inputs[:, 2 + shape.width : -3]
    cache = states_of(batch.states, shape.state)

    def naive(tokens: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        return naive_ssd(xbc[tokens].double(), dt[tokens].double(), weights, state)

    return SsdCase(batch, xbc, dt, weights, cache, *compute_naively(batch, cache, naive))


@dataclass(frozen=True, slots=True)
class SsdReplay:
    batch: ReplayBatch
    xbc: Tensor
    dt: Tensor
    weights: SsdWeights
    cache: Tensor
    pending: list[Tensor]  # by row: xbc, then dt
    expected: Results

    def check(self, *, on_cpu: bool, tolerance: float, batch_invariant: bool = False) -> None:
        batch, cache = self.batch, self.cache.clone()
        again = replay_cases.as_pending(batch, self.pending, on_cpu=on_cpu)
        width = self.xbc.shape[1]
        out = ssd(
            self.xbc,
            self.dt,
            self.weights,
            cache,
            batch.query_start_loc,
            batch.states,
            pending=PendingInputs(again[:, :width].contiguous(), again[:, width:].contiguous()),
            num_decodes=0,
            batch_invariant=batch_invariant,
            plan=plan_states(batch.query_start_loc, batch.states, NUM_CONV_INPUTS) if on_cpu else None,
        )
        assert not out.isnan().any(), "padding has numbers"
        for row in range(len(batch.rows)):
            close(out[batch.own(row)], self.expected.out[batch.own(row)], tolerance)
        torch.testing.assert_close(cache, self.expected.cache, rtol=tolerance, atol=tolerance, equal_nan=True)


def ssd_replay(rows: Sequence[ReplayRow], shape: SsdShape, dtype: torch.dtype) -> SsdReplay:
    batch, weights = replay_cases.batch_of(rows), shape.weights()
    num_tokens, width = int(batch.query_start_loc[-1]), shape.width
    inputs = torch.randn(num_tokens, width + shape.heads).to(dtype)
    pending = [torch.randn(row.num_pending, width + shape.heads).to(dtype) for row in rows]
    cache = states_of(batch.states, shape.state)

    def naive(both: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return naive_ssd(both[:, :width], both[:, width:], weights, state)

    expected = replay_cases.compute_naively(batch, cache, pending, inputs, naive)
    return SsdReplay(batch, inputs[:, :width], inputs[:, width:], weights, cache, pending, expected)
