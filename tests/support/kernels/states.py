"""Layers with states, against naive results in float64: short convolutions, the gated delta rule, Mamba2's state space,
and these again for drafts that were kept."""

from typing import Any

import torch

from proa_engine.kernels.states.replay_rows import make_replay
from support import replay_cases
from support.kernels.case import ON_CPU, WITHOUT_DTYPE, grid, holds, on_device
from support.replay_cases import conv_replay, delta_replay
from support.ssd_cases import SHAPES as SSD_SHAPES
from support.ssd_cases import SsdShape, ssd_case, ssd_replay
from support.state_cases import BATCHES, CONVS, ROWS, conv_case, delta_case

DTYPES = (torch.float32, torch.bfloat16)
ON_GPU = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
DELTA_SHAPES: list[dict[str, int]] = [
    {"key_heads": 2, "heads": 4, "key_dim": 16, "value_dim": 16},
    {"key_heads": 1, "heads": 3, "key_dim": 20, "value_dim": 36},
]
DELTA_SHAPES_OF_GPUS: list[dict[str, int]] = [
    {"key_heads": 16, "heads": 32, "key_dim": 128, "value_dim": 128},
    {"key_heads": 2, "heads": 6, "key_dim": 64, "value_dim": 64},
    {"key_heads": 1, "heads": 3, "key_dim": 20, "value_dim": 36},
    {"key_heads": 2, "heads": 6, "key_dim": 16, "value_dim": 24},
]
SSD_SHAPES_OF_GPUS = [
    SsdShape(heads=64, groups=8, head_dim=64, state_size=128),  # Nemotron 3 Nano
    SsdShape(heads=48, groups=1, head_dim=64, state_size=128),  # Granite 4 Tiny
    SsdShape(heads=6, groups=3, head_dim=36, state_size=20),
]
CONVS_OF_CPUS = [{"kind": kind, "channels": 300 if kind == "delta nets" else 37} for kind in CONVS]
CONVS_OF_GPUS = [{"kind": kind, "channels": 8192} for kind in CONVS]


def check(case: Any, dtype: torch.dtype, device: str, **options: Any) -> None:
    tolerance = (ON_CPU if device == "cpu" else ON_GPU)[dtype]
    on_device(case, device).check(on_cpu=False, tolerance=tolerance, **options)


@holds(interpreted=grid(CONVS_OF_CPUS, rows=BATCHES), gpu=grid(CONVS_OF_GPUS, rows=BATCHES), dtypes=DTYPES)
def short_conv(dtype: torch.dtype, device: str, rows: str, kind: str, channels: int) -> None:
    check(conv_case(ROWS[rows], channels, dtype, CONVS[kind]), dtype, device)


@holds(
    interpreted=grid(CONVS_OF_CPUS, rows=replay_cases.BATCHES),
    gpu=grid(CONVS_OF_GPUS, rows=replay_cases.BATCHES),
    dtypes=DTYPES,
)
def replayed_short_conv(dtype: torch.dtype, device: str, rows: str, kind: str, channels: int) -> None:
    check(conv_replay(replay_cases.BATCHES[rows], channels, dtype, CONVS[kind]), dtype, device)


@holds(
    interpreted=[
        *grid(rows=("mixed", "decodes"), sizes=DELTA_SHAPES[:1]),
        {"rows": "long", "sizes": DELTA_SHAPES[1]},
        {"rows": "long", "sizes": DELTA_SHAPES[0], "similar": True},
        {"rows": "short", "sizes": DELTA_SHAPES[1], "batch_invariant": True},
    ],
    gpu=[
        *grid(rows=BATCHES, sizes=DELTA_SHAPES_OF_GPUS, batch_invariant=(False, True)),
        {"rows": "long", "sizes": DELTA_SHAPES_OF_GPUS[0], "similar": True},
    ],
    dtypes=DTYPES,
)
def delta_rule(
    dtype: torch.dtype,
    device: str,
    rows: str,
    sizes: dict[str, int],
    *,
    similar: bool = False,
    batch_invariant: bool = False,
) -> None:
    case = delta_case(ROWS[rows], dtype=dtype, similar=similar, **sizes)
    of_cache = ON_CPU[torch.float32] if batch_invariant and device == "cpu" else None
    check(case, dtype, device, batch_invariant=batch_invariant, cache_tolerance=of_cache)


@holds(
    interpreted=[
        *({"rows": rows, "sizes": sizes} for rows, sizes in zip(replay_cases.BATCHES, DELTA_SHAPES, strict=True)),
        {"rows": "mixed", "sizes": DELTA_SHAPES[0], "batch_invariant": True},
    ],
    gpu=grid(rows=replay_cases.BATCHES, sizes=DELTA_SHAPES_OF_GPUS, batch_invariant=(False, True)),
    dtypes=DTYPES,
)
def replayed_delta_rule(
    dtype: torch.dtype, device: str, rows: str, sizes: dict[str, int], *, batch_invariant: bool = False
) -> None:
    case = delta_replay(replay_cases.BATCHES[rows], dtype=dtype, **sizes)
    check(case, dtype, device, batch_invariant=batch_invariant)


@holds(
    interpreted=[
        *grid(rows=("mixed", "decodes"), sizes=SSD_SHAPES[:1]),
        {"rows": "long", "sizes": SSD_SHAPES[1]},
        {"rows": "short", "sizes": SSD_SHAPES[1], "batch_invariant": True},
    ],
    gpu=grid(rows=BATCHES, sizes=SSD_SHAPES_OF_GPUS, batch_invariant=(False, True)),
    dtypes=DTYPES,
)
def state_space(dtype: torch.dtype, device: str, rows: str, sizes: SsdShape, *, batch_invariant: bool = False) -> None:
    check(ssd_case(ROWS[rows], sizes, dtype), dtype, device, batch_invariant=batch_invariant)


@holds(
    interpreted=[{"rows": rows, "sizes": sizes} for rows, sizes in zip(replay_cases.BATCHES, SSD_SHAPES, strict=True)],
    gpu=grid(rows=replay_cases.BATCHES, sizes=SSD_SHAPES_OF_GPUS, batch_invariant=(False, True)),
    dtypes=DTYPES,
)
def replayed_state_space(
    dtype: torch.dtype, device: str, rows: str, sizes: SsdShape, *, batch_invariant: bool = False
) -> None:
    check(ssd_replay(replay_cases.BATCHES[rows], sizes, dtype), dtype, device, batch_invariant=batch_invariant)


@holds(interpreted=[{}])
def states_of_strong_decays(dtype: torch.dtype, device: str) -> None:
    """Decays over a chunk are differences of one sum, so that states keep their digits."""
    case = ssd_case(ROWS["long"], SSD_SHAPES[0], torch.float32, decay=30.0)
    _, cache = case.compute(on_cpu=False)
    torch.testing.assert_close(cache, case.expected_cache, rtol=1e-6, atol=1e-6, equal_nan=True)


@holds(interpreted=[{}], gpu=[{}], dtypes=WITHOUT_DTYPE)
def pending_tokens(dtype: torch.dtype, device: str) -> None:
    """They are counted from the true ends, of decodes and of rows with drafts."""
    slots, ends = torch.tensor([3, 1, 0, 5]), torch.tensor([20, 9, 0, 31])
    num_tokens, starts = torch.tensor([4, 1, 0, 1]), torch.tensor([0, 4, 8, 12, 16], dtype=torch.int32)
    for num_samples in (num_tokens, torch.tensor([2, 0, 0, 1])):
        positions = torch.tensor([90, 8, 90, 14, 90, 27, 0], dtype=torch.int32)
        arguments = on_device((positions, slots, ends, num_tokens, num_samples, starts), device)
        replay = make_replay(*arguments, width=4, num_rows=4)
        assert replay.slots.tolist() == [3, 1, 6, 5]
        assert replay.num_pending.tolist() == [2, 0, 0, 3]
        assert replay.num_kept.tolist() == [4, 0, 0, 0]
        assert replay.starts.tolist() == [0, 7, 12, 15]
        assert arguments[0].tolist() == [90, 9, 90, 16, 90, 31, 0]
