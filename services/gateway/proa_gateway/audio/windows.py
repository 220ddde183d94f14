"""WindowCutter: cuts long audio at quiet places into windows that a model reads."""

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

SEARCHED_SECONDS: Final = 5.0  # at the end of a window, in which it is cut
QUIET_SECONDS: Final = 0.1  # of the quietest place, in whose middle it is cut
SILENCE: Final = 0.001  # of full scale, -60 dB: quieter samples are no sound

Samples = NDArray[np.float32]


class WindowCutter:
    """Windows do not overlap: all samples are in one of them, in their order."""

    def __init__(self, max_samples: int, sampling_rate: int) -> None:
        """`max_samples`: of a window."""
        self._max_samples = max_samples
        self._sampling_rate = sampling_rate
        self._parts: list[Samples] = []  # not yet in a window
        self._num_samples = 0  # of `_parts`

    def add(self, samples: Samples) -> Iterator[Samples]:
        """Yield the windows that are complete: audio that fits one window is not cut."""
        self._parts.append(samples)
        self._num_samples += len(samples)
        while self._num_samples > self._max_samples:
            buffered = self.rest()
            end = quietest_place(buffered[: self._max_samples], self._sampling_rate)
            self._parts, self._num_samples = [buffered[end:]], len(buffered) - end
            yield buffered[:end]

    def rest(self) -> Samples:
        """Take all samples that are in no window."""
        parts, self._parts, self._num_samples = self._parts, [], 0
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def quietest_place(samples: Samples, sampling_rate: int) -> int:
    """The index of the middle of the quietest 100 ms in the last 5 s, at most half of the samples. Of places that are
    equally quiet the last one."""
    searched = min(len(samples) // 2, round(SEARCHED_SECONDS * sampling_rate))
    size = min(round(QUIET_SECONDS * sampling_rate), searched)
    start = len(samples) - searched
    energy = np.concatenate([[0.0], np.cumsum(np.square(samples[start:], dtype=np.float64))])
    sums = energy[size:] - energy[:-size]  # of each place
    last = len(sums) - 1 - int(np.argmin(sums[::-1]))
    return start + last + size // 2


def is_silent(samples: Samples) -> bool:
    return float(np.abs(samples).max(initial=0)) < SILENCE
