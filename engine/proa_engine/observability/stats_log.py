"""A line of the log every 10 s while the engine is busy, worded as vLLM's.

It is made from counters that exist anyway, on the I/O thread: steps do nothing for it.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from proa.contract import SchedulerStats
from proa.logs import with_fields
from proa_engine.core.counters import DraftCounts

SECONDS = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Totals:
    """Tokens since the engine's start: of prompts, without those from a cache, and of outputs; its load now, and
    its drafts."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    drafts: DraftCounts = field(default_factory=DraftCounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What an engine did between two totals. Shares are from 0 to 1; those of drafts are None if there were none."""

    prompt_tokens_per_second: float
    generation_tokens_per_second: float
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    prefix_cache_hit_rate: float
    draft_acceptance_rate: float | None
    mean_acceptance_length: float | None
    num_preemptions: int

    @classmethod
    def between(cls, before: Totals, after: Totals, seconds: float, last_hit_rate: float) -> "Interval":
        """`last_hit_rate`: of the prefix cache, for an interval without lookups."""
        hit_rate = _share(
            after.stats.prefix_cache_hits - before.stats.prefix_cache_hits,
            after.stats.prefix_cache_queries - before.stats.prefix_cache_queries,
        )
        old, new = before.stats, after.stats
        num_drafts = after.drafts.num_drafts - before.drafts.num_drafts
        num_accepted = after.drafts.num_accepted_tokens - before.drafts.num_accepted_tokens
        num_draft_tokens = after.drafts.num_draft_tokens - before.drafts.num_draft_tokens
        accepted_per_draft = _share(num_accepted, num_drafts)
        return cls(
            prompt_tokens_per_second=(after.prompt_tokens - before.prompt_tokens) / seconds,
            generation_tokens_per_second=(after.generation_tokens - before.generation_tokens) / seconds,
            num_running=new.num_running_reqs,
            num_waiting=new.num_waiting_reqs,
            kv_cache_usage=new.kv_cache_usage,
            prefix_cache_hit_rate=last_hit_rate if hit_rate is None else hit_rate,
            num_preemptions=new.num_preemptions - old.num_preemptions,
            draft_acceptance_rate=_share(num_accepted, num_draft_tokens),
            mean_acceptance_length=None if accepted_per_draft is None else 1 + accepted_per_draft,
        )

    @property
    def is_busy(self) -> bool:
        tokens = self.prompt_tokens_per_second + self.generation_tokens_per_second
        return bool(tokens or self.num_running or self.num_waiting)

    def line(self, kv_cache: str) -> str:
        """`kv_cache`: what the line calls it."""
        text = (
            f"Avg prompt throughput: {self.prompt_tokens_per_second:.1f} tokens/s, "
            f"Avg generation throughput: {self.generation_tokens_per_second:.1f} tokens/s, "
            f"Running: {self.num_running} reqs, Waiting: {self.num_waiting} reqs, "
            f"{kv_cache} usage: {100 * self.kv_cache_usage:.1f}%, "
            f"Prefix cache hit rate: {100 * self.prefix_cache_hit_rate:.1f}%"
        )
        if self.draft_acceptance_rate is not None:
            text += f", Avg Draft acceptance rate: {100 * self.draft_acceptance_rate:.1f}%"
            text += f", Mean acceptance length: {self.mean_acceptance_length:.2f}"
        return text + (f", Preempted: {self.num_preemptions} times" if self.num_preemptions else "")


class StatsLog:
    """Turns totals into lines: one for each interval in which the engine was busy, and one for the first after it."""

    def __init__(self, before: Totals) -> None:
        self._before = before
        self._was_busy = False
        self._hit_rate = 0.0

    def next(self, after: Totals, seconds: float) -> Interval | None:
        """Return what has happened since the last call, `seconds` ago. None: there is nothing to log."""
        interval = Interval.between(self._before, after, seconds, self._hit_rate)
        self._before, self._hit_rate = after, interval.prefix_cache_hit_rate
        was_busy, self._was_busy = self._was_busy, interval.is_busy
        return interval if interval.is_busy or was_busy else None


async def log_stats(totals: Callable[[], Totals], *, on_gpu: bool, seconds: float = SECONDS) -> None:
    """Log until cancelled."""
    kv_cache = "GPU KV cache" if on_gpu else "KV cache"
    log, then = StatsLog(totals()), time.monotonic()
    while True:
        await asyncio.sleep(seconds)
        now = time.monotonic()
        if (interval := log.next(totals(), now - then)) is not None:
            _log.info("%s", interval.line(kv_cache), extra=with_fields(**asdict(interval)))
        then = now


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
