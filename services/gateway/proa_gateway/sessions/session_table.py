"""SessionTable: the places of one engine, from the arrival of a session's turn to its end."""

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from proa_gateway.sessions.identities import Identities
from proa_gateway.sessions.places import Places
from proa_gateway.sessions.session import Session, Turn

HEAD_SECONDS: Final = 15.0
"""How long a session waits at the queue's head before others leave for it from the budget."""
_MOST_SAVED: Final = 30.0  # seconds of computing


class SessionTable:
    """Decides which sessions keep their blocks in an engine's cache. `Places` says who fits. A session that waits takes
    the place of idle residents once the places that these held for nothing have cost as much time as computing them
    again will (the argument of ski rental).

    A pure class: `now` is any monotonic clock, `rate` the engine's prefill rate in blocks a second. For each turn call
    `admit`, `start` and `end`. While sessions wait, call `tick`, and for the queue's head `admit`, `displace` and
    `rotate` until it has a place or has waited long enough.
    """

    def __init__(self, capacity: int, identities: Identities, *, rotation: float = 0.1) -> None:
        """`identities`: of all engines' sessions. `rotation`: share of the engine's time that may be spent on computing
        again what was displaced for sessions that have waited long."""
        self.places = Places(capacity)
        self._identities = identities
        self.longest_elsewhere = 0.0  # seconds that a session of another gateway has waited; 0: none waits
        self._rotation = rotation
        self._lost = 0.0  # seconds that places have cost since sessions began to wait
        self._saved = 0.0  # seconds of the budget
        self._ticked_at: float | None = None  # None: nobody waited

    def admit(self, turn: Turn, now: float) -> bool:
        """Whether the turn's session has a place here now; it gives up the one that it has elsewhere. Residents that
        will hardly come back leave for it."""
        session, places = turn.session, self.places
        if session.home is places:
            return True
        if not places.fits(session, turn.hashes) and not (
            places.leave_gone(now, self._identities.means) and places.fits(session, turn.hashes)
        ):
            return False
        places.admit(session, turn.hashes)
        return True

    def displace(self, turn: Turn, now: float, rate: float, head_since: float) -> bool:
        """Admit the turn of the queue's head in the place of idle residents, if those that must leave have cost enough,
        or in room that was kept for what others may become. `head_since`: when it got to the head."""
        session, places = turn.session, self.places
        leaving, price, idle = list[Session](), 0.0, self._displaceable(now, rate)
        while not places.fits_without(leaving, session, turn.hashes):
            each, each_price = next(idle, (None, 0.0))
            if each is None:
                return False
            leaving.append(each)
            price += each_price
        if price <= self._lost:
            self._lost -= price
        elif now - head_since >= HEAD_SECONDS and price <= self._saved:
            self._saved -= price
        else:
            return False
        for each in leaving:
            places.leave(each)
        places.admit(session, turn.hashes)
        return True

    def rotate(self, now: float, rate: float, head_since: float) -> bool:
        """All residents run: the one that was admitted first leaves at its turn's end, for the budget. Returns whether
        one does."""
        running = next((each for each in self.places.residents if each.num_running), None)
        if running is None:
            return False
        if not running.must_leave and now - head_since >= HEAD_SECONDS:
            price = len(running.path) / rate
            if price <= self._saved:
                self._saved -= price
                running.must_leave = True
        return running.must_leave

    def give_up(self, now: float, rate: float) -> None:
        """Let the resident that is expected back last leave for sessions that wait in other gateways, if its place has
        cost enough."""
        last, price = next(self._displaceable(now, rate), (None, 0.0))
        if last is not None and price <= self._lost:
            self._lost -= price
            self.places.leave(last)

    def start(self, turn: Turn, now: float) -> None:
        """The turn is sent. A session without a place is computed, and leaves the cache as others do."""
        session = turn.session
        for forgotten in self._identities.mark(session, turn.hashes):
            forgotten.leave()
        session.num_running += 1
        session.move(turn.hashes)
        if turn.is_first:
            self.places.num_first_blocks += len(turn.hashes)
        self.places.make_room(now, self._identities.means)

    def end(self, turn: Turn, output: Sequence[bytes], now: float) -> None:
        """The turn has ended. `output`: blocks behind those of the prompt."""
        session = turn.session
        session.num_running -= 1
        session.idle_since = now
        if turn.is_first:
            self.places.num_first_blocks -= len(turn.hashes)
        if output and session.path is turn.hashes:
            session.move([*turn.hashes, *output])
        if session.must_leave and not session.num_running:
            session.leave()

    def tick(self, now: float, *, waiting: Collection[Session], is_busy: bool) -> None:
        """Count what places cost. `waiting`: sessions that wait here for places; those that called them do not hold
        theirs for nothing. `is_busy`: the engine has waiting prompts, so another resident would gain nothing.

        While first turns run, residents that will hardly come back leave: what other prompts share would find no room
        beside theirs otherwise, long after their sessions have ended."""
        if self.places.num_first_blocks:
            self.places.leave_gone(now, self._identities.means)
        if not waiting and not self.longest_elsewhere:
            self._ticked_at, self._lost = None, 0.0
            return
        seconds = 0.0 if self._ticked_at is None else now - self._ticked_at
        self._ticked_at = now
        self._saved = min(self._saved + self._rotation * seconds, _MOST_SAVED)
        if is_busy:
            return
        blocks = {each: len(each.path) for each in self.places.residents}
        parents = {each.parent for each in waiting}
        idle = sum(size for each, size in blocks.items() if not each.num_running and each not in parents)
        self._lost += seconds * idle / max(sum(blocks.values()) + self.places.num_others, 1)

    def _displaceable(self, now: float, rate: float) -> Iterator[tuple[Session, float]]:
        """Idle residents, the one expected back last first, and the seconds that computing their blocks again takes.
        Those that are expected back sooner than that stay."""
        for each in self.places.by_return(now):
            price = len(each.path) / rate
            if each.until_next(now) >= price:
                yield each, price
