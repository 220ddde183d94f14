"""Progress of loading and warming up is reported in few lines, with an estimate of the time left."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from proa_engine.layers.weights import Slice
from proa_engine.models.weight_sources import CheckpointWeights
from proa_engine.observability import progress as progress_module
from proa_engine.observability.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lines_of(total: float, rate: float, step: float) -> list[str]:
    """The lines of a job of `total` bytes with `rate` bytes a second, of which `step` are done at a time."""
    lines: list[str] = []
    clock = Clock()
    progress = Progress(lines.append, "loading weights", total, "GB", scale=1e9, now=clock)
    for _ in range(round(total / step)):
        clock.now += step / rate
        progress.add(step)
    return lines


def test_a_short_job_has_no_line() -> None:
    assert lines_of(total=8e9, rate=2e9, step=1e8) == []


def test_the_first_line_comes_early_and_estimates_the_time_left() -> None:
    assert lines_of(total=140e9, rate=2e9, step=1e9)[0] == "loading weights: 10.0 of 140.0 GB (7 %), about 65 s left"


def test_long_jobs_have_about_twenty_lines_but_one_at_least_every_half_minute() -> None:
    assert 10 <= len(lines_of(total=140e9, rate=2e9, step=1e8)) <= 20
    assert 10 <= len(lines_of(total=140e9, rate=0.5e9, step=1e8)) <= 20
    slow = lines_of(total=140e9, rate=0.05e9, step=1e8)  # 2,800 s
    assert 80 <= len(slow) <= 95
    assert slow[0].endswith("about 46 min left")


def test_counts_are_shown_without_decimals() -> None:
    lines: list[str] = []
    clock = Clock()
    progress = Progress(lines.append, "warming up", 40, "steps", now=clock)
    clock.now += 8
    progress.add(10)
    assert lines == ["warming up: 10 of 40 steps (25 %), about 24 s left"]


@pytest.mark.parametrize("takes", ["take", "leave"])
def test_a_checkpoints_progress_counts_what_is_taken_or_left_to_other_ranks(
    takes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(progress_module, "NUM_LINES", 1e9)
    tensors = {name: torch.zeros(250_000_00) for name in ("e.1.up", "e.1.down", "e.10.up", "unused")}
    save_file(tensors, tmp_path / "model.safetensors")
    lines: list[str] = []
    checkpoint = CheckpointWeights(tmp_path, torch.float32, torch.device("cpu"))
    checkpoint.begin(lambda name: name == "unused", lines.append)
    if takes == "leave":
        checkpoint.leave("e.1")
    else:
        for name in ("e.1.up", "e.1.down", "e.1.down"):
            checkpoint.take(name, (250_000_00,), Slice(0, 0, 1))
    assert lines[0] == f"loading 0.3 GB of weights from 1 file of {tmp_path}"
    assert lines[-1].startswith("loading weights: 0.2 of 0.3 GB (67 %), about ")
