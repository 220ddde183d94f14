"""DraftDepth: how many draft tokens the rows of the next step have, one number for all of them.

A schedule says it by the number of rows, or it is measured: the number is best that gives the most tokens a second,
`(1 + a[1] + … + a[k]) / seconds[k]`, where `a[j]` is the share of rows whose first j draft tokens were all accepted.
The shares are of all rows, those that cannot have drafts too, so that few of them do not decide for many. Both change
with load and text, so every number is tried again from time to time. Which one is used changes no output.
"""

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median
from typing import Protocol

from proa_engine.core.timing.step_costs import RowSizes

_SAMPLES = 9  # last steps whose median is a number's time
_FIRST_SAMPLES = 3  # a number with fewer is tried next
_STEPS_BETWEEN_TRIALS = 128  # of the number that was tried longest ago
_KEPT = 0.995  # of the counts of accepted drafts, by step
_BETTER = 1.03  # a number replaces another if it gives so many times as many tokens a second


class DraftDepth(Protocol):
    @property
    def num_drafts(self) -> int:
        """Of each row of the next step."""
        ...

    def add(self, num_rows: int, sizes: RowSizes, accepted: Sequence[int], seconds: float) -> None:
        """Count a step that has ended. `accepted` [places] are the numbers of rows whose draft token at this place and
        all before it were accepted."""
        ...


class ScheduledDepth:
    """The number of draft tokens by the number of rows of the step before."""

    def __init__(self, schedule: Sequence[tuple[int, int]]) -> None:
        """`schedule`: numbers of rows, ascending from 1, and the draft tokens of steps of at least so many rows."""
        self._first_rows = [first for first, _ in schedule]
        self._drafts = [num_drafts for _, num_drafts in schedule]
        self.num_drafts = self._drafts[0]

    def add(self, num_rows: int, sizes: RowSizes, accepted: Sequence[int], seconds: float) -> None:
        self.num_drafts = self._drafts[bisect_right(self._first_rows, num_rows) - 1]


class MeasuredDepth:
    """The number of draft tokens, at most `max_drafts`, with the most tokens a second at this number of rows.

    Times are kept by powers of two of rows. Begins with `max_drafts`, so that shares of all places are known early.
    """

    def __init__(self, max_drafts: int) -> None:
        self.num_drafts = max_drafts
        self._best = max_drafts
        self._accepted = [0.0] * max_drafts  # rows, decayed; by place
        self._rows = [0.0] * max_drafts  # of steps with a draft token at this place
        # By size class of rows and number of draft tokens.
        self._seconds: defaultdict[int, list[deque[float]]] = defaultdict(
            lambda: [deque(maxlen=_SAMPLES) for _ in range(max_drafts + 1)]
        )
        self._tried_at = [0] * (max_drafts + 1)  # step
        self._num_steps = 0

    def add(self, num_rows: int, sizes: RowSizes, accepted: Sequence[int], seconds: float) -> None:
        """Steps with chunks of prompts, and those that took no time because the clock was set back, do not count."""
        if sizes.chunks or seconds <= 0:
            return
        num_drafts = max(sizes.drafted, default=1) - 1
        self._num_steps += 1
        self._tried_at[num_drafts] = self._num_steps
        for place in range(num_drafts):
            self._rows[place] = self._rows[place] * _KEPT + num_rows
            num_accepted = accepted[place] if place < len(accepted) else 0
            self._accepted[place] = self._accepted[place] * _KEPT + num_accepted
        times = self._seconds[num_rows.bit_length()]
        times[num_drafts].append(seconds)
        self.num_drafts = self._choose(times)

    def _choose(self, times: Sequence[Sequence[float]]) -> int:
        untried = [num_drafts for num_drafts, samples in enumerate(times) if len(samples) < _FIRST_SAMPLES]
        if untried:
            return untried[-1]
        tokens, rates = 1.0, []
        for num_drafts, samples in enumerate(times):
            if num_drafts:
                tokens += self._accepted[num_drafts - 1] / self._rows[num_drafts - 1]
            rates.append(tokens / median(samples))
        best = max(range(len(rates)), key=rates.__getitem__)
        if rates[best] > _BETTER * rates[self._best]:
            self._best = best
        if self._num_steps % _STEPS_BETWEEN_TRIALS == 0:
            return min(range(len(rates)), key=self._tried_at.__getitem__)
        return self._best
