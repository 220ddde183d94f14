"""Long audio is cut at quiet places into windows."""

from collections.abc import Sequence

import numpy as np
import pytest

from proa_gateway.audio.windows import Samples, WindowCutter, is_silent, quietest_place
from support.audio_files import tone

RATE = 1000


def cut(samples: Samples, *, part: int = 37, max_samples: int = 30 * RATE) -> list[Samples]:
    cutter = WindowCutter(max_samples, RATE)
    windows = [each for start in range(0, len(samples), part) for each in cutter.add(samples[start : start + part])]
    return [*windows, cutter.rest()]


def with_pauses(seconds: float, pauses: Sequence[float]) -> Samples:
    """Noise with pauses of 200 ms at these seconds."""
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, round(seconds * RATE)).astype(np.float32)
    for pause in pauses:
        samples[round(pause * RATE) : round((pause + 0.2) * RATE)] = 0
    return samples


@pytest.mark.parametrize("part", [1, 999, 100_000])
def test_windows_hold_all_samples_in_order_whatever_parts_they_came_in(part: int) -> None:
    samples = with_pauses(100, [27, 55])
    windows = cut(samples, part=part)
    assert np.array_equal(np.concatenate(windows), samples)
    assert all(25 * RATE <= len(window) <= 30 * RATE for window in windows[:-1])


def test_windows_are_cut_in_the_pauses_of_their_last_five_seconds() -> None:
    first, second, *_ = (len(window) / RATE for window in cut(with_pauses(80, [10, 26, 40, 52.5])))
    assert 26.0 < first < 26.2
    assert 52.5 < first + second < 52.7


def test_audio_that_fits_one_window_is_not_cut() -> None:
    assert [len(each) for each in cut(with_pauses(30, [28]))] == [30 * RATE]
    assert [len(each) > 0 for each in cut(with_pauses(30.001, [28]))] == [True, True]


def test_of_equally_quiet_places_the_last_one_is_the_cut() -> None:
    assert quietest_place(np.zeros(30 * RATE, np.float32), RATE) == 30 * RATE - 50


def test_short_windows_are_cut_in_their_second_half() -> None:
    windows = cut(with_pauses(10, []), max_samples=RATE)
    assert all(RATE // 2 <= len(window) <= RATE for window in windows[:-1])
    assert [len(each) for each in cut(np.ones(9, np.float32), max_samples=2, part=1)][:-1] == [1] * 7


def test_only_what_is_below_60_db_throughout_is_silent() -> None:
    assert is_silent(np.zeros(0, np.float32))
    assert is_silent(tone(1, RATE, level=0.0009))
    assert not is_silent(np.append(np.zeros(RATE, np.float32), np.float32(0.002)))
