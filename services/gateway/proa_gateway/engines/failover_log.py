"""The log of failovers: one line for each pair of engines, not one for each stream.

An engine's loss moves all its streams within a second or so, to several engines.
"""

import asyncio
import logging
from collections import Counter

from proa.logs import with_fields

SECONDS = 1.0  # in which streams are counted together
_log = logging.getLogger(__name__)


class FailoverLog:
    """Counts streams, and logs the counts a second after the first one of a loss."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._resumed = Counter[tuple[str, str]]()  # lost engine, the one that continues
        self._given_up = Counter[tuple[str, str]]()  # lost engine, error
        self._due: asyncio.TimerHandle | None = None  # None: nothing is counted

    def record_resumed(self, lost: str, engine: str) -> None:
        """A stream of the engine at `lost` continues on `engine`."""
        self._resumed[lost, engine] += 1
        self._schedule()

    def record_given_up(self, lost: str, error: str) -> None:
        """A stream of the engine at `lost` failed with this error."""
        self._given_up[lost, error] += 1
        self._schedule()

    def flush(self) -> None:
        """Log what has been counted."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        for (lost, engine), count in self._resumed.items():
            fields = with_fields(lost_engine=lost, engine=engine, num_streams=count)
            _log.info("resumed %s of %s on %s", _streams(count), lost, engine, extra=fields)
        for (lost, error), count in self._given_up.items():
            fields = with_fields(lost_engine=lost, num_streams=count)
            _log.warning("gave up %s of %s: %s", _streams(count), lost, error, extra=fields)
        self._resumed.clear()
        self._given_up.clear()

    def _schedule(self) -> None:
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(self._seconds, self.flush)


def _streams(count: int) -> str:
    return f"{count} stream" if count == 1 else f"{count} streams"
