"""On a CPU, kernels of recurrent layers equal naive results, and a token's bits depend only on the tokens before it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from proa_engine.kernels.states.state_rows import StateRows
from support import replay_cases, ssd_cases
from support.kernels import states
from support.ssd_cases import SsdShape, ssd_case, ssd_replay
from support.state_cases import BATCHES, CONVS, SHORT, Batch, ConvKind, Row, conv_case, delta_case


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("kind", CONVS.values(), ids=CONVS.keys())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_short_conv_on_a_cpu_equals_naive_results(
    rows: Any, kind: ConvKind, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    case = conv_case(rows, 37, dtype, kind)
    out, cache = case.compute(on_cpu=True)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), case.expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(cache.nan_to_num(9), case.expected_cache.nan_to_num(9))


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("shape", [*states.DELTA_SHAPES, {"key_heads": 1, "heads": 2, "key_dim": 128, "value_dim": 64}])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_delta_rule_on_a_cpu_equals_naive_results(
    rows: Any, shape: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    case = delta_case(rows, dtype=dtype, **shape)
    out, cache = case.compute(on_cpu=True)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), case.expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(cache, case.expected_cache, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("shape", ssd_cases.SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_ssd_on_a_cpu_equals_naive_results(rows: Any, shape: SsdShape, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    ssd_case(rows, shape, dtype).check(on_cpu=True, tolerance=tolerance)


@pytest.mark.parametrize("rows", replay_cases.BATCHES.values(), ids=replay_cases.BATCHES.keys())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_replayed_rows_on_a_cpu_equal_naive_results(rows: Any, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    for kind in CONVS.values():
        replay_cases.conv_replay(rows, 37, dtype, kind).check(on_cpu=True, tolerance=tolerance)
    for shape in states.DELTA_SHAPES:
        replay_cases.delta_replay(rows, dtype=dtype, **shape).check(on_cpu=True, tolerance=tolerance)
    for ssd_shape in ssd_cases.SHAPES:
        ssd_replay(rows, ssd_shape, dtype).check(on_cpu=True, tolerance=tolerance)


def test_pending_tokens_on_a_cpu_are_counted_from_true_ends() -> None:
    states.pending_tokens.check(torch.float32, "cpu", {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_on_a_cpu_depend_neither_on_the_batch_nor_on_cuts(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = (*SHORT, Row((31, 1)))
    delta = delta_case(rows, key_heads=1, heads=3, key_dim=20, value_dim=12, dtype=dtype)
    conv = conv_case(rows, 37, dtype)
    state_space = ssd_case(rows, ssd_cases.SHAPES[1], dtype)
    together = [each.compute(on_cpu=True) for each in (delta, conv, state_space)]
    for row, segments in enumerate(delta.batch.row_segments):
        start = int(delta.batch.query_start_loc[row])
        part = slice(start, start + sum(segments))
        for step in (1, 2, 7, 1000):  # tokens a step
            out, state = stepwise(
                replace(delta, qkv=delta.qkv[part], gates=delta.gates[part]), delta.batch.states, row, step
            )
            assert torch.equal(out, together[0][0][part])
            assert torch.equal(state, last_state(together[0][1], delta.batch.states, row))
            out, state = stepwise(replace(conv, x=conv.x[part]), conv.batch.states, row, step)
            assert torch.equal(out, together[1][0][part])
            assert torch.equal(state, last_state(together[1][1], conv.batch.states, row))
            of_row = replace(state_space, xbc=state_space.xbc[part], dt=state_space.dt[part])
            out, state = stepwise(of_row, state_space.batch.states, row, step)
            assert torch.equal(out, together[2][0][part])
            assert torch.equal(state, last_state(together[2][1], state_space.batch.states, row))


def last_state(cache: torch.Tensor, states: StateRows, row: int) -> torch.Tensor:
    return cache[int(states.write[int(states.first_segments[row + 1]) - 1])]


def stepwise(case: Any, states: StateRows, row: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one row alone, `tokens` a step; returns its output and its last state."""
    slot = int(states.read[row])
    fields = [name for name in ("qkv", "gates", "x", "xbc", "dt") if hasattr(case, name)]
    parts = [getattr(case, name).split(tokens) for name in fields]
    outs, cache = [], case.cache
    for part in zip(*parts, strict=True):
        length = len(part[0])
        starts = torch.tensor([0, length], dtype=torch.int32)
        one = torch.tensor([0, 1], dtype=torch.int32)
        rows = StateRows(torch.tensor([slot], dtype=torch.int32), torch.tensor([0], dtype=torch.int32), one, starts)
        batch = Batch(starts, rows, int(length == 1), [[length]])
        out, cache = replace(case, batch=batch, cache=cache, **dict(zip(fields, part, strict=True))).compute(
            on_cpu=True
        )
        outs.append(out)
        slot = 0
    return torch.cat(outs), cache[0]
