"""ModelSessions: the sessions of one model, and on which of its engines each has a place."""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from proa.contract import SchedulerStats
from proa_gateway.sessions.identities import Identities
from proa_gateway.sessions.session import Session, Turn
from proa_gateway.sessions.session_table import SessionTable

_UNKNOWN_RATE: Final = 1000.0  # prompt tokens a second of an engine that has not measured it


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
        self._num_waiting_blocks = 0

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
        return (num_held + self._num_waiting_blocks) / max(sum(each.capacity for each in places), 1)

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
        return None if session is None else self._home(session)

    def expect(self, hashes: Sequence[bytes]) -> Turn | None:
        """The turn that a prompt with these full blocks is going to be, if its session may have to wait for a place;
        None for a first one."""
        session = self._identities.find(hashes)
        if session is None:
            return None
        session.wait(self._clock())
        return Turn(session, hashes, is_first=False)

    def arrive(self, hashes: Sequence[bytes]) -> Turn:
        """A prompt with these full blocks is about to be sent."""
        session = self._identities.arrive(hashes)
        is_first = not session.num_turns
        session.begin(hashes, self._clock(), self._identities.means)
        return Turn(session, hashes, is_first)

    def place(self, turn: Turn) -> bool:
        """Whether the turn's session has a place, on any engine."""
        turn.session.idle_since = self._clock()
        return turn.session.is_resident or self._admit(turn, self._usable())

    def displace(self, turn: Turn, head_since: float) -> bool:
        """Whether the queue's head, there since that time, gets a place for which idle residents leave."""
        now, usable = self._clock(), self._usable()
        if any(table.displace(turn, now, self._rate(one), head_since) for one, table in usable):
            return True
        for one, table in usable:
            if table.rotate(now, self._rate(one), head_since):
                break
        return False

    def tick(self, waiting: Sequence[Turn]) -> None:
        """Count what places cost while these turns wait for some."""
        tables = self._usable()
        self._num_waiting_blocks = sum(
            min((table.places.missing(each.hashes) for _, table in tables), default=0) for each in waiting
        )
        for engine, table in tables:
            stats = engine.load_stats
            is_busy = stats.num_waiting_reqs > stats.num_fetching_reqs
            table.tick(self._clock(), is_waiting=bool(waiting), is_busy=is_busy)

    def _usable(self) -> list[tuple[Engine, SessionTable]]:
        return [(engine, table) for engine, table in self._tables.items() if engine.usable]

    def _home(self, session: Session) -> Engine | None:
        return next((engine for engine, table in self._tables.items() if session.home is table.places), None)

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
