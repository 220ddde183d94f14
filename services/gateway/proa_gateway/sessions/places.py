"""Places: which sessions may keep their blocks in one engine's cache, and which of these leave for others."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from proa_gateway.sessions.session import Means, Session

_USABLE: Final = 0.95  # share of the cache that residents and running first turns may have
_RESERVE: Final = 0.5  # turns of growth for which room is kept
_ENDED: Final = 0.2  # weight of the newest value in the mean size of sessions that have ended
_POINTS: Final = 8  # of time, at which the sizes of all residents are added up


@dataclass(slots=True)
class Places:
    """The residents of a cache of `capacity` blocks.

    `held` counts by hash which blocks their paths have, so that what they share counts once: its length is the working
    set. Hashes are chains: where two paths agree at a block they agree before it.
    """

    capacity: int
    residents: dict[Session, None] = field(default_factory=dict)  # in the order in which they were admitted
    held: dict[bytes, int] = field(default_factory=dict)
    released: list[bytes] = field(default_factory=list)  # no resident has them any more; for the engine
    num_others: int = 0  # blocks of other gateways' residents
    num_first_blocks: int = 0  # of running first turns
    ended_size: float = 0.0  # mean blocks of sessions that have ended; 0: none has

    @property
    def limit(self) -> float:
        """Blocks that residents may have now."""
        return _USABLE * self.capacity - self.num_others - self.num_first_blocks

    @property
    def room(self) -> float:
        """Blocks that no resident has, of those that residents may have."""
        return self.limit - len(self.held)

    def missing(self, path: Sequence[bytes]) -> int:
        """How many blocks of a path no resident has."""
        return len(path) - bisect_left(path, True, key=lambda block_hash: block_hash not in self.held)

    def fits(self, session: Session, path: Sequence[bytes]) -> bool:
        """Whether there is room for one more resident with this path, and for what all are about to add."""
        growth = self._growth([*self.residents, session])
        return len(self.held) + self.missing(path) + growth <= self.limit

    def fits_without(self, leaving: Sequence[Session], session: Session, path: Sequence[bytes]) -> bool:
        """Whether there is room for one more resident with this path if others leave. Room is kept for the next turns
        only: with as much as the residents may become, places that cost nothing would stay empty."""
        staying = [each for each in self.residents if each not in leaving]
        freed = sum(self._num_own(each.path) for each in leaving)
        return len(self.held) - freed + self.missing(path) + _next_growth([*staying, session]) <= self.limit

    def fits_alone(self, session: Session, path: Sequence[bytes]) -> bool:
        """Whether there would be room for a resident with this path if it were the only one."""
        return len(path) + session.means.growth <= _USABLE * self.capacity

    def admit(self, session: Session, path: Sequence[bytes]) -> None:
        """Give the session a place. It gives up the one that it has elsewhere."""
        session.leave()
        self.residents[session] = None
        session.home, session.must_leave, session.path = self, False, path
        self._add(path)

    def move(self, session: Session, path: Sequence[bytes]) -> None:
        """A resident has another path now, which mostly continues the old one."""
        old, session.path = session.path, path
        shorter = min(len(old), len(path))
        common = bisect_left(range(shorter), True, key=lambda index: old[index] != path[index])
        self._add(path[common:])
        self._remove(old[common:])

    def leave(self, session: Session, *, has_ended: bool = False) -> None:
        """`has_ended`: it will hardly come back."""
        del self.residents[session]
        session.home, session.must_leave = None, False
        self._remove(session.path)
        if has_ended:
            size = len(session.path)
            self.ended_size += (_ENDED if self.ended_size else 1.0) * (size - self.ended_size)

    def leave_gone(self, now: float, means: Means) -> int:
        """Let residents leave that will hardly come back. Returns how many did."""
        gone = [each for each in self.residents if each.is_gone(now, means.gap)]
        for session in gone:
            self.leave(session, has_ended=True)
        return len(gone)

    def make_room(self, now: float, means: Means, path: Sequence[bytes] = ()) -> None:
        """A resident is about to have this path. If residents have more than they may have then, let those leave that
        will hardly come back, then the last admitted ones, which have least to lose, until the others fit. A running
        one leaves at its turn's end; if the cache is full until then, idle ones leave first, which may be the one that
        is about to run. Each gateway gives up its share."""
        usable, num_held = int(_USABLE * self.capacity), len(self.held) + self.missing(path)
        if num_held + self.num_others <= usable:
            return
        num_held -= len(self.held)
        self.leave_gone(now, means)
        num_held += len(self.held)
        excess = num_held + self.num_others - usable
        excess = excess * num_held // (num_held + self.num_others) if self.num_others else excess
        is_full = num_held + self.num_others > self.capacity
        for session in sorted(reversed(self.residents), key=lambda each: is_full and each.num_running > 0):
            if excess <= 0 or len(self.residents) == 1:
                break
            excess -= self._num_own(session.path)
            if session.num_running:
                session.must_leave = True
            else:
                self.leave(session)

    def take_released(self) -> list[bytes]:
        """What the engine may evict, without what was taken again since."""
        released = [each for each in self.released if each not in self.held]
        self.released = []
        return released

    def by_return(self, now: float) -> list[Session]:
        """Idle residents, the one expected back last first."""
        idle = [each for each in self.residents if not each.num_running]
        return sorted(idle, key=lambda each: each.until_next(now), reverse=True)

    def _growth(self, sessions: Sequence[Session]) -> float:
        """Blocks that sessions will add. At least half a turn's growth of each; if it is known how large sessions get,
        the most that all together have before some of them end."""
        least = _next_growth(sessions)
        if not self.ended_size:
            return least
        turns = [max(self.ended_size - each.num_blocks, 0.0) / max(each.means.growth, 0.1) for each in sessions]
        longest = max(turns)
        return max(
            least, *(self._growth_after(longest * point / _POINTS, sessions, turns) for point in range(1, _POINTS + 1))
        )

    @staticmethod
    def _growth_after(time: float, sessions: Sequence[Session], turns: Iterable[float]) -> float:
        """Blocks that sessions have more after `time` turns. `turns`: after how many each ends."""
        return sum(
            time * each.means.growth if time < end else -each.num_blocks
            for each, end in zip(sessions, turns, strict=True)
        )

    def _num_own(self, path: Sequence[bytes]) -> int:
        """How many blocks of a resident's path no other one has: those behind the ones that they share."""
        return len(path) - bisect_left(path, True, key=lambda block_hash: self.held[block_hash] == 1)

    def _add(self, path: Sequence[bytes]) -> None:
        for block_hash in path:
            self.held[block_hash] = self.held.get(block_hash, 0) + 1

    def _remove(self, path: Sequence[bytes]) -> None:
        for block_hash in path:
            count = self.held[block_hash] - 1
            if count:
                self.held[block_hash] = count
            else:
                del self.held[block_hash]
                self.released.append(block_hash)


def _next_growth(sessions: Iterable[Session]) -> float:
    """Blocks that sessions add until some of them leave."""
    return _RESERVE * sum(each.means.growth for each in sessions)
