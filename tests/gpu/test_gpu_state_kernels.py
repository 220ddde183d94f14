"""Kernels of recurrent layers on a GPU against naive results in float64."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

from support import replay_cases
from support.ssd_cases import SsdShape, ssd_case, ssd_replay
from support.state_cases import BATCHES, CONVS, ConvCase, ConvKind, DeltaCase, conv_case, delta_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
SHAPES: list[dict[str, Any]] = [
    {"key_heads": 16, "heads": 32, "key_dim": 128, "value_dim": 128},
    {"key_heads": 2, "heads": 6, "key_dim": 64, "value_dim": 64},
    {"key_heads": 1, "heads": 3, "key_dim": 20, "value_dim": 36},
    {"key_heads": 2, "heads": 6, "key_dim": 16, "value_dim": 24},
]
SSD_SHAPES = [
    SsdShape(heads=64, groups=8, head_dim=64, state_size=128),  # Nemotron 3 Nano
    SsdShape(heads=48, groups=1, head_dim=64, state_size=128),  # Granite 4 Tiny
    SsdShape(heads=6, groups=3, head_dim=36, state_size=20),
]


def on_gpu(value: Any) -> Any:
    """A copy of a tensor, or of a dataclass or sequence with its tensors, on the GPU."""
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, list | tuple):
        return type(value)(map(on_gpu, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: on_gpu(getattr(value, each.name)) for each in fields(value)})
    return value


def check(case: ConvCase | DeltaCase, dtype: torch.dtype, **options: bool) -> None:
    results = on_gpu(case).compute(on_cpu=False, **options)
    for ours, theirs in zip(results, (case.expected, case.expected_cache), strict=True):
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(ours.float().cpu(), theirs.float(), atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("kind", CONVS.values(), ids=CONVS.keys())
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
def test_short_conv(rows: Any, kind: ConvKind, dtype: torch.dtype) -> None:
    check(conv_case(rows, 8192, dtype, kind), dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
def test_delta_rule(rows: Any, shape: dict[str, Any], dtype: torch.dtype) -> None:
    case = delta_case(rows, dtype=dtype, **shape)
    check(case, dtype)
    check(case, dtype, batch_invariant=True)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", SSD_SHAPES)
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
def test_ssd(rows: Any, shape: SsdShape, dtype: torch.dtype) -> None:
    case = on_gpu(ssd_case(rows, shape, dtype))
    case.check(on_cpu=False, tolerance=TOLERANCE[dtype])
    case.check(on_cpu=False, tolerance=TOLERANCE[dtype], batch_invariant=True)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", SSD_SHAPES)
@pytest.mark.parametrize("rows", replay_cases.BATCHES.values(), ids=replay_cases.BATCHES.keys())
def test_replayed_ssd(rows: Any, shape: SsdShape, dtype: torch.dtype) -> None:
    case = on_gpu(ssd_replay(rows, shape, dtype))
    case.check(on_cpu=False, tolerance=TOLERANCE[dtype])
    case.check(on_cpu=False, tolerance=TOLERANCE[dtype], batch_invariant=True)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_chunks_of_similar_keys_keep_their_digits(dtype: torch.dtype) -> None:
    check(delta_case(BATCHES["long"], dtype=dtype, similar=True, **SHAPES[0]), dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("kind", CONVS.values(), ids=CONVS.keys())
@pytest.mark.parametrize("rows", replay_cases.BATCHES.values(), ids=replay_cases.BATCHES.keys())
def test_replayed_short_conv(rows: Any, kind: ConvKind, dtype: torch.dtype) -> None:
    on_gpu(replay_cases.conv_replay(rows, 8192, dtype, kind)).check(on_cpu=False, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", replay_cases.BATCHES.values(), ids=replay_cases.BATCHES.keys())
def test_replayed_delta_rule(rows: Any, shape: dict[str, Any], dtype: torch.dtype) -> None:
    case = on_gpu(replay_cases.delta_replay(rows, dtype=dtype, **shape))
    case.check(on_cpu=False, tolerance=TOLERANCE[dtype])
    case.check(on_cpu=False, tolerance=TOLERANCE[dtype], batch_invariant=True)
