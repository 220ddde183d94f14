"""Session: a conversation as a gateway sees it, a path of block hashes that grows with each turn."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

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


class Home(Protocol):
    """An engine's cache in which the session has a place."""

    def move(self, session: "Session", path: Sequence[bytes]) -> None:
        """The session has another path now."""
        ...

    def make_room(self, now: float, means: Means, path: Sequence[bytes]) -> None:
        """A session with a place is about to have this path. Sessions for which there is no room then leave."""
        ...

    def leave(self, session: "Session") -> None: ...


@dataclass(slots=True, eq=False)
class Session:
    """`path`: the blocks of its last prompt, and of the output once that has ended, while it has a place: without one,
    thousands of prompts would hold 50 bytes a block. `num_blocks`: of both, always. `marks`: last blocks of its
    prompts, the newest last. `home`: where it has a place. `parent`: the session that called it as a sub-agent, as far
    as their ids tell. Times are those of one monotonic clock."""

    means: Means
    client_id: str | None = None  # if it is the first one with it
    parent: "Session | None" = None
    path: Sequence[bytes] = ()
    num_prompt_blocks: int = 0
    num_blocks: int = 0
    marks: deque[bytes] = field(default_factory=deque)
    num_running: int = 0
    num_turns: int = 0
    home: Home | None = None
    must_leave: bool = False  # its home, when its running turn ends
    idle_since: float = 0.0  # when its last turn ended, or the next one came to wait, or got a place
    waited_gap: float | None = None  # seconds from a turn's end to the arrival of one that waits; None: none does

    @property
    def is_resident(self) -> bool:
        return self.home is not None

    @property
    def is_awaited(self) -> bool:
        """Whether a session with a place waits for its end."""
        return self.parent is not None and self.parent.is_resident

    def move(self, path: Sequence[bytes]) -> None:
        """It has another path now, which mostly continues the old one. Without effect if it has no place."""
        if self.home is not None:
            self.home.move(self, path)

    def leave(self) -> None:
        """Give up its place, if it has one."""
        if self.home is not None:
            self.home.leave(self)

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

    def wait(self, now: float) -> None:
        """A turn has come that may wait for a place."""
        if self.waited_gap is None:
            self.waited_gap = self.idle(now)
        self.idle_since = now

    def begin(self, hashes: Sequence[bytes], now: float, all_means: Means) -> None:
        """A turn with this prompt is sent."""
        waited_gap, self.waited_gap = self.waited_gap, None
        if self.num_turns:
            gap = self.idle(now) if waited_gap is None else waited_gap
            growth = max(len(hashes) - self.num_prompt_blocks, 0)
            self.means.add(gap, growth, _OWN)
            all_means.add(gap, growth, _ALL)
        self.num_turns += 1
        self.num_prompt_blocks = self.num_blocks = len(hashes)


@dataclass(slots=True, eq=False)
class Turn:
    """One prompt of a session. `is_first`: no earlier prompt of the session is known."""

    session: Session
    hashes: Sequence[bytes]
    is_first: bool
