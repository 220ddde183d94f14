"""ModelSessions: the sessions of one model, and on which of its engines each has a place."""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from proa.contract import SchedulerStats, SessionClaim
from proa_gateway.sessions.identities import Identities
from proa_gateway.sessions.session import Turn
from proa_gateway.sessions.session_table import SessionTable

_UNKNOWN_RATE: Final = 1000.0  # prompt tokens a second of an engine that has not measured it
_ADOPTED: Final = 0.75  # share of a prompt that an engine has
_TICK_SECONDS: Final = 0.1  # shortest time between two


class Engine(Protocol):
    """An engine with a session. `usable`: whether new requests may be sent to it."""

    address: str
    load_stats: SchedulerStats

    @property
    def usable(self) -> bool: ...


class ModelSessions:
    """A session has a place on one engine, its home, or on none. One without a place gets it on the engine that has
    most of its prompt of those where it fits.

    Engines agree on the hashes of blocks. `clock`: monotonic, in seconds. `count_cached`: how many leading blocks of a
    prompt the engine of an address has in its cache.
    """

    def __init__(
        self, block_size: int, clock: Callable[[], float], count_cached: Callable[[str, Sequence[bytes]], int]
    ) -> None:
        self._block_size = block_size
        self._clock = clock
        self._count_cached = count_cached
        self._identities = Identities()
        self._tables: dict[Engine, SessionTable] = {}
        self._ticked_at = 0.0
        self.waiting: dict[Turn, float] = {}  # turns that wait for a place, since when

    @property
    def has_engines(self) -> bool:
        """Whether an engine is usable."""
        return any(engine.usable for engine in self._tables)

    @property
    def capacity(self) -> float:
        """How many sessions of the residents' mean size fit; 0: not known."""
        places = [table.places for table in self._tables.values()]
        num_residents, num_held = sum(len(each.residents) for each in places), sum(len(each.held) for each in places)
        return sum(each.capacity for each in places) * num_residents / num_held if num_held else 0.0

    @property
    def demand(self) -> float:
        """Blocks of residents, and of turns that wait, of all that there are; 1: it is full."""
        places = [table.places for table in self._tables.values()]
        num_held = sum(len(each.held) for each in places)
        num_waiting = sum(min((each.missing(turn.hashes) for each in places), default=0) for turn in self.waiting)
        return (num_held + num_waiting) / max(sum(each.capacity for each in places), 1)

    def add(self, engine: Engine, num_blocks: int) -> SessionTable:
        """An engine has connected, with a cache of `num_blocks`."""
        table = self._tables[engine] = SessionTable(num_blocks, self._identities)
        return table

    def remove(self, engine: Engine) -> None:
        """The engine's session has ended."""
        self.evacuate(engine)
        del self._tables[engine]

    def evacuate(self, engine: Engine) -> None:
        """The engine, which is not usable any more, has no residents. Those that are expected back soonest get places
        on others as far as they fit, before sessions that wait now."""
        now = self._clock()
        residents = sorted(self._tables[engine].places.residents, key=lambda each: each.until_next(now))
        for session in residents:
            session.leave()
        others = [(one, table) for one, table in self._usable() if one is not engine]
        for session in residents:
            if not session.is_gone(now, self._identities.means.gap):
                self._admit(Turn(session, session.path, is_first=False), others)

    def home(self, hashes: Sequence[bytes]) -> Engine | None:
        """Where the session that a prompt continues has its place."""
        session = self._identities.find(hashes)
        if session is None or session.home is None:
            return None
        return next((engine for engine, table in self._tables.items() if table.places is session.home), None)

    def expect(self, hashes: Sequence[bytes]) -> Turn | None:
        """The turn that a prompt with these full blocks is going to be, if its session may have to wait for a place;
        None for a first one."""
        session = self._identities.find(hashes)
        if session is None:
            return None
        session.wait(self._clock())
        return Turn(session, hashes, is_first=False)

    def arrive(self, hashes: Sequence[bytes], client_id: str | None = None) -> Turn:
        """A prompt with these full blocks is about to be sent. `client_id`: the client's for its conversation."""
        session = self._identities.arrive(hashes, client_id)
        is_first = not session.num_turns
        session.begin(hashes, self._clock(), self._identities.means)
        return Turn(session, hashes, is_first)

    def passes(self, turn: Turn) -> bool:
        """Whether the turn need not wait: its session has a place in which it has room, or gets one on an engine that
        has most of its prompt, and blocks of it that only another gateway can have sent."""
        if turn.session.home is not None:
            turn.session.home.make_room(self._clock(), self._identities.means, turn.hashes)
            if turn.session.is_resident:
                return True
        for engine, table in self._usable():
            num_cached = self._count_cached(engine.address, turn.hashes)
            if num_cached >= _ADOPTED * len(turn.hashes) and num_cached > turn.session.num_blocks:
                table.places.admit(turn.session, turn.hashes)
                return True
        return False

    def may_fit(self, turn: Turn) -> bool:
        """Whether the turn's session could have a place at all. A turn for which none is large enough need not wait."""
        return any(table.places.fits_alone(turn.session, turn.hashes) for _, table in self._usable())

    def place(self, turn: Turn) -> bool:
        """Whether the turn's session has a place, on any engine."""
        turn.session.idle_since = self._clock()
        return turn.session.is_resident or self._admit(turn, self._usable())

    def admits(self, turn: Turn, head_since: float) -> bool:
        """Whether the queue's head, there since that time, gets a place, also in that of idle residents."""
        return self.is_next and (self.place(turn) or self._displace(turn, head_since))

    def _displace(self, turn: Turn, head_since: float) -> bool:
        now, usable = self._clock(), self._usable()
        if any(table.displace(turn, now, self._rate(one), head_since) for one, table in usable):
            return True
        for one, table in usable:
            if table.rotate(now, self._rate(one), head_since):
                break
        return False

    def tick(self) -> None:
        """Count what places cost while turns wait for some, here or in other gateways, for which residents leave if
        that is their turn. Call it at least every half second."""
        now = self._clock()
        if now - self._ticked_at < _TICK_SECONDS:
            return
        self._ticked_at, longest = now, self._longest_wait
        waiting = [turn.session for turn in self.waiting]
        for engine, table in self._usable():
            stats = engine.load_stats
            is_busy = stats.num_waiting_reqs > stats.num_fetching_reqs
            table.tick(now, waiting=waiting, is_busy=is_busy)
            if table.longest_elsewhere > longest:
                table.give_up(now, self._rate(engine))

    def observe(self, engine: Engine, num_blocks: int, longest_wait: float) -> None:
        """The engine reports what other gateways claim: blocks of their residents, and how long a turn has waited."""
        table = self._tables[engine]
        table.places.num_others, table.longest_elsewhere = num_blocks, longest_wait

    def claim(self, engine: Engine) -> SessionClaim:
        """What other gateways should know of this one's sessions."""
        return SessionClaim(len(self._tables[engine].places.held), self._longest_wait)

    @property
    def is_next(self) -> bool:
        """Whether no turn has waited longer in another gateway."""
        longest = self._longest_wait
        return all(table.longest_elsewhere <= longest for _, table in self._usable())

    @property
    def _longest_wait(self) -> float:
        return self._clock() - min(self.waiting.values()) if self.waiting else 0.0

    def _usable(self) -> list[tuple[Engine, SessionTable]]:
        return [(engine, table) for engine, table in self._tables.items() if engine.usable]

    def _admit(self, turn: Turn, tables: Sequence[tuple[Engine, SessionTable]]) -> bool:
        """Give the session a place where there is room; where residents would have to leave, though they will hardly
        come back, only if there is no other."""
        now = self._clock()
        if len(tables) > 1:
            tables = sorted(tables, key=lambda each: self._preference(turn, *each), reverse=True)
        return any(table.admit(turn, now) for _, table in tables)

    def _preference(self, turn: Turn, engine: Engine, table: SessionTable) -> tuple[bool, int, float]:
        fits = table.places.fits(turn.session, turn.hashes)
        return fits, self._count_cached(engine.address, turn.hashes), table.places.room

    def _rate(self, engine: Engine) -> float:
        """Blocks a second that the engine computes."""
        return (engine.load_stats.prefill_tokens_per_second or _UNKNOWN_RATE) / self._block_size
