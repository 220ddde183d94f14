"""When the requests of a benchmark are sent: all at once, or at a rate as a Poisson process, burstier or more even."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

Strategy = Literal["linear", "exponential"]


@dataclass(frozen=True, slots=True)
class RampUp:
    """A rate that changes from the first request to the last one, in requests a second."""

    strategy: Strategy
    start: float
    end: float

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end or self.end == 0:
            raise ValueError("--ramp-up-end-rps must be above zero and at least --ramp-up-start-rps")
        if self.strategy == "exponential" and self.start == 0:
            raise ValueError("an exponential ramp-up needs --ramp-up-start-rps above zero")

    def rates(self, count: int) -> list[float]:
        shares = [index / max(count - 1, 1) for index in range(count)]
        if self.strategy == "linear":
            return [self.start + (self.end - self.start) * share for share in shares]
        return [float(self.start * (self.end / self.start) ** share) for share in shares]


@dataclass(frozen=True, slots=True)
class Burstiness:
    """The shape of the gamma distribution of the gaps between requests: 1 is a Poisson process, less is burstier,
    infinity is even."""

    shape: float = 1.0

    def __post_init__(self) -> None:
        if not self.shape > 0:
            raise ValueError(f"{self.shape:g} is not a number above zero, or inf")

    def __str__(self) -> str:
        return f"{self.shape:g}"


def arrival_times(
    count: int,
    rate: float | None,
    burstiness: Burstiness,
    draw: np.random.Generator,
    ramp_up: RampUp | None = None,
) -> list[float]:
    """Return the time of each request in seconds after the start, ascending.

    `rate`: requests a second; None: all at the start. With a fixed rate the times are scaled so that the last request
    is sent after exactly `count / rate` seconds, as in vLLM: a random sum would differ by a few per cent from seed to
    seed. `ramp_up` takes the place of `rate`.
    """
    if rate is None and ramp_up is None:
        return [0.0] * count
    # The first rate of a linear ramp from zero would make an endless gap: the second one is used.
    rates = np.array(ramp_up.rates(count) if ramp_up is not None else [rate] * count)
    means = 1 / np.where(rates > 0, rates, rates[min(1, count - 1)] or 1.0)
    shape = burstiness.shape
    gaps = means if np.isinf(shape) else draw.gamma(shape, means / shape)
    times = np.cumsum(gaps)
    if rate is not None and ramp_up is None:
        times *= count / rate / times[-1]
    return [float(time) for time in times]
