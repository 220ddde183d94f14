"""Kernels of recurrent layers in Triton's interpreter, against naive results in float64."""

from itertools import product
from typing import Any

import torch

from proa_engine.kernels import gated_group_norm, rms_norm
from proa_engine.kernels.states.replay_rows import make_replay
from support import replay_cases, ssd_cases
from support.interpreter import TOLERANCE, close
from support.ssd_cases import ssd_case, ssd_replay
from support.state_cases import BATCHES, CONVS, DECODES, LONG, MIXED, OF_DELTA_NETS, SHORT, conv_case, delta_case

SHAPES: list[dict[str, Any]] = [
    {"key_heads": 2, "heads": 4, "key_dim": 16, "value_dim": 16},
    {"key_heads": 1, "heads": 3, "key_dim": 20, "value_dim": 36},
]


def check_short_conv(dtype: torch.dtype) -> None:
    for rows, kind in product(BATCHES.values(), CONVS.values()):
        case = conv_case(rows, 300 if kind is OF_DELTA_NETS else 37, dtype, kind)
        out, cache = case.compute(on_cpu=False)
        close(out.float(), case.expected, TOLERANCE[dtype])
        torch.testing.assert_close(cache, case.expected_cache, rtol=0, atol=0, equal_nan=True)


def check_delta_rule(dtype: torch.dtype) -> None:
    for rows in (MIXED, DECODES):
        assert_delta_case(rows, SHAPES[0], dtype)
    assert_delta_case(LONG, SHAPES[1], dtype)


def check_delta_rule_of_similar_keys(dtype: torch.dtype) -> None:
    assert_delta_case(LONG, SHAPES[0], dtype, similar=True)


def assert_delta_case(rows: Any, shape: dict[str, Any], dtype: torch.dtype, *, similar: bool = False) -> None:
    case = delta_case(rows, dtype=dtype, similar=similar, **shape)
    out, cache = case.compute(on_cpu=False)
    close(out.float(), case.expected, TOLERANCE[dtype])
    torch.testing.assert_close(cache, case.expected_cache, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True)


def check_invariant_delta_rule(dtype: torch.dtype) -> None:
    case = delta_case(SHORT, dtype=dtype, **SHAPES[1])
    out, cache = case.compute(on_cpu=False, batch_invariant=True)
    close(out.float(), case.expected, TOLERANCE[dtype])
    torch.testing.assert_close(cache, case.expected_cache, rtol=2e-5, atol=2e-5, equal_nan=True)


def check_gated_rms_norm(dtype: torch.dtype) -> None:
    x, gate = torch.randn(5, 3 * 20).to(dtype), torch.randn(5, 90).to(dtype)[:, 7:67]
    weight = torch.randn(20).to(dtype)
    values = x.double().view(5, 3, 20)
    expected = values / (values.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    expected = (expected.flatten(1) * torch.nn.functional.silu(gate.double())).to(dtype)
    close(rms_norm.gated_rms_norm_reference(x, gate, weight, 1e-6), expected)
    close(rms_norm.gated_rms_norm(x, gate, weight, 1e-6), expected)


def check_replayed_short_conv(dtype: torch.dtype) -> None:
    for rows, kind in product(replay_cases.BATCHES.values(), CONVS.values()):
        channels = 300 if kind is OF_DELTA_NETS else 37
        replay_cases.conv_replay(rows, channels, dtype, kind).check(on_cpu=False, tolerance=TOLERANCE[dtype])


def check_replayed_delta_rule(dtype: torch.dtype) -> None:
    for rows, shape in zip(replay_cases.BATCHES.values(), SHAPES, strict=True):
        replay_cases.delta_replay(rows, dtype=dtype, **shape).check(on_cpu=False, tolerance=TOLERANCE[dtype])


def check_invariant_replayed_delta_rule(dtype: torch.dtype) -> None:
    case = replay_cases.delta_replay(replay_cases.MIXED, dtype=dtype, **SHAPES[0])
    case.check(on_cpu=False, tolerance=TOLERANCE[dtype], batch_invariant=True)


def check_ssd(dtype: torch.dtype) -> None:
    for rows in (MIXED, DECODES):
        ssd_case(rows, ssd_cases.SHAPES[0], dtype).check(on_cpu=False, tolerance=TOLERANCE[dtype])
    ssd_case(LONG, ssd_cases.SHAPES[1], dtype).check(on_cpu=False, tolerance=TOLERANCE[dtype])


def check_states_of_strong_decays(dtype: torch.dtype) -> None:
    """Decays over a chunk are differences of one sum, so that states keep their digits."""
    case = ssd_case(LONG, ssd_cases.SHAPES[0], torch.float32, decay=30.0)
    _, cache = case.compute(on_cpu=False)
    torch.testing.assert_close(cache, case.expected_cache, rtol=1e-6, atol=1e-6, equal_nan=True)


def check_invariant_ssd(dtype: torch.dtype) -> None:
    case = ssd_case(SHORT, ssd_cases.SHAPES[1], dtype)
    case.check(on_cpu=False, tolerance=TOLERANCE[dtype], batch_invariant=True)


def check_replayed_ssd(dtype: torch.dtype) -> None:
    for rows, shape in zip(replay_cases.BATCHES.values(), ssd_cases.SHAPES, strict=True):
        ssd_replay(rows, shape, dtype).check(on_cpu=False, tolerance=TOLERANCE[dtype])


def check_gated_group_norm(dtype: torch.dtype) -> None:
    x, gate = torch.randn(5, 3 * 20).to(dtype), torch.randn(5, 90).to(dtype)[:, 7:67]
    weight = torch.randn(60).to(dtype)
    values = (x.double() * torch.nn.functional.silu(gate.double())).view(5, 3, 20)
    expected = values / (values.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = (expected.flatten(1) * weight.double()).to(dtype)
    close(gated_group_norm.gated_group_norm_reference(x, gate, weight, 20, 1e-6), expected)
    close(gated_group_norm.gated_group_norm(x, gate, weight, 20, 1e-6), expected)


def check_replay_rows(dtype: torch.dtype) -> None:
    """Of decodes and of rows with drafts, on the device and by the reference."""
    slots, ends = torch.tensor([3, 1, 0, 5]), torch.tensor([20, 9, 0, 31])
    num_tokens, starts = torch.tensor([4, 1, 0, 1]), torch.tensor([0, 4, 8, 12, 16], dtype=torch.int32)
    for num_samples in (num_tokens, torch.tensor([2, 0, 0, 1])):
        positions = torch.tensor([90, 8, 90, 14, 90, 27, 0], dtype=torch.int32)
        replay = make_replay(positions, slots, ends, num_tokens, num_samples, starts, width=4, num_rows=4)
        assert replay.slots.tolist() == [3, 1, 6, 5]
        assert replay.num_pending.tolist() == [2, 0, 0, 3]
        assert replay.num_kept.tolist() == [4, 0, 0, 0]
        assert replay.starts.tolist() == [0, 7, 12, 15]
        assert positions.tolist() == [90, 9, 90, 16, 90, 31, 0]
