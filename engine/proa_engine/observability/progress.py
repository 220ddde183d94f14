"""Progress of a job that takes minutes, as lines of a log."""

import time
from collections.abc import Callable

FIRST_SECONDS = 5.0  # from the start to the first line
LAST_SECONDS = 30.0  # at most between two lines
NUM_LINES = 20  # about so many in all


class Progress:
    """Calls `report` with lines such as "loading weights: 12.4 of 141.1 GB (9 %), about 40 s left".

    The first one comes after 5 s, so that short jobs have none. A long job has about 20, but there are never more than
    30 s between two.
    """

    def __init__(
        self,
        report: Callable[[str], None],
        job: str,
        total: float,
        unit: str,
        *,
        scale: float = 1.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`total` is the amount of work, shown in `unit` after a division by `scale`."""
        self._report = report
        self._job = job
        self._total = total
        self._unit = unit
        self._scale = scale
        self._now = now
        self._done = 0.0
        self._started = self._reported = now()

    def add(self, amount: float) -> None:
        """Count work as done, and report if it is time."""
        self._done += amount
        now = self._now()
        if not 0 < self._done < self._total:
            return
        estimate = (now - self._started) / self._done * self._total
        if now - self._reported >= min(max(FIRST_SECONDS, estimate / NUM_LINES), LAST_SECONDS):
            self._reported = now
            self._report(self._line(estimate - (now - self._started)))

    def _line(self, seconds_left: float) -> str:
        places = 0 if self._scale == 1.0 else 1
        done, total = (f"{amount / self._scale:,.{places}f}" for amount in (self._done, self._total))
        share = 100 * self._done / self._total
        return f"{self._job}: {done} of {total} {self._unit} ({share:.0f} %), about {_duration(seconds_left)} left"


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f}" if num_bytes >= 1e8 else f"{num_bytes / 1e9:.4f}"


def _duration(seconds: float) -> str:
    return f"{max(seconds, 1):.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
