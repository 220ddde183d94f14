"""Session: a conversation as a gateway sees it, a path of block hashes that grows with each turn."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

MAX_MARKS: Final = 64
"""Ends of earlier prompts by which a turn is found that does not continue the last one."""
_OWN: Final = 0.3  # weight of the newest value in a session's means
_ALL: Final = 0.05  # and in those of all sessions
_GONE_GAPS: Final = 4.0
_LEAST_GONE: Final = 0.25  # seconds


@dataclass(slots=True)
class Means:
    """`gap`: seconds between a turn's end and the next one. `growth`: blocks by which a prompt is longer than the one
    before."""

    gap: float = 1.0
    growth: float = 1.0

    def add(self, gap: float, growth: float, weight: float) -> None:
        self.gap += weight * (gap - self.gap)
        self.growth += weight * (growth - self.growth)


@dataclass(slots=True, eq=False)
class Session:
    """`path`: the blocks of its last prompt, and of the output once that has ended. `marks`: last blocks of its
    prompts, the newest last. Times are those of one monotonic clock."""

    means: Means
    path: Sequence[bytes] = ()
    num_prompt_blocks: int = 0
    marks: deque[bytes] = field(default_factory=deque)
    num_running: int = 0
    num_turns: int = 0
    is_resident: bool = False
    must_leave: bool = False  # when its running turn ends
    idle_since: float = 0.0

    def idle(self, now: float) -> float:
        """Seconds since its last turn has ended; 0 while one runs."""
        return 0.0 if self.num_running else now - self.idle_since

    def is_gone(self, now: float, mean_gap: float) -> bool:
        """Whether it has been idle for so much longer than it used to be that it will hardly come back."""
        return self.idle(now) > max(_GONE_GAPS * max(self.means.gap, mean_gap), _LEAST_GONE)

    def until_next(self, now: float) -> float:
        """Expected seconds until its next turn. It is expected later the longer it is overdue."""
        idle = self.idle(now)
        return self.means.gap - idle if idle < self.means.gap else idle

    def begin(self, hashes: Sequence[bytes], now: float, all_means: Means) -> None:
        """A turn with this prompt has come."""
        if self.num_turns:
            gap, growth = self.idle(now), max(len(hashes) - self.num_prompt_blocks, 0)
            self.means.add(gap, growth, _OWN)
            all_means.add(gap, growth, _ALL)
        self.num_turns += 1
        self.num_prompt_blocks = len(hashes)
