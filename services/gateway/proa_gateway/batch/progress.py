"""Progress of a batch: counts, and a line of them on standard error."""

import asyncio
import sys
import time
from dataclasses import dataclass, field

INTERVAL = 5.0  # seconds between two lines


@dataclass(slots=True)
class Progress:
    """Counts of this run. `num_failed`: of the lines that are done, those without status 200."""

    num_done: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    num_skipped: int = 0  # the output file had them already
    started: float = field(default_factory=time.perf_counter)

    def add(self, *, failed: bool, num_tokens: int = 0) -> None:
        self.num_done += 1
        self.num_failed += failed
        self.num_tokens += num_tokens

    def describe(self, seconds: float) -> str:
        """`seconds`: since the start."""
        rate = self.num_tokens / seconds if seconds > 0 else 0.0
        skipped = f", {self.num_skipped} answered before" if self.num_skipped else ""
        return f"{self.num_done} lines done, {self.num_failed} failed, {rate:.1f} output tokens/s{skipped}"

    def show(self) -> None:
        print(self.describe(time.perf_counter() - self.started), file=sys.stderr, flush=True)

    async def show_regularly(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL)
            self.show()
