"""Sessions of several engines: each has a place on one, and gets another if that engine is not used any more."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from proa.contract import EngineCoreRequest, SamplingParams, SchedulerStats, SessionClaim
from proa_gateway.engines.engine_loras import EngineLoras
from proa_gateway.routing.policies import RoutingHints, hash_chain
from proa_gateway.routing.router import Router
from proa_gateway.sessions.engine_sessions import EngineSessions
from proa_gateway.sessions.model_sessions import ModelSessions
from proa_gateway.sessions.session import Session, Turn
from proa_gateway.sessions.session_table import HEAD_SECONDS
from support.model_info import model_info

RATE = 10  # blocks a second


def path(name: str, length: int) -> list[bytes]:
    return [f"{name} {index}".encode() for index in range(length)]


@dataclass(eq=False)
class Engine:
    address: str
    usable: bool = True
    cached: set[bytes] = field(default_factory=set)
    load_stats: SchedulerStats = field(default_factory=lambda: SchedulerStats(prefill_tokens_per_second=RATE))
    load: int = 0
    kv_cache_usage: float = 0.0
    loras: EngineLoras = field(default_factory=lambda: EngineLoras("", lambda lora, model: None))


def request(length: int) -> EngineCoreRequest:
    return EngineCoreRequest(request_id="a", prompt_token_ids=[1] * length, sampling_params=SamplingParams())


class Model:
    """Engines with caches of these numbers of blocks, each of one token."""

    def __init__(self, *capacities: int) -> None:
        self.now = 0.0
        self.engines = [Engine(str(number)) for number in range(len(capacities))]
        self.sessions = ModelSessions(1, lambda: self.now, self.count_cached)
        pairs = zip(self.engines, capacities, strict=True)
        self.tables = {engine: self.sessions.add(engine, capacity) for engine, capacity in pairs}

    def count_cached(self, address: str, hashes: Sequence[bytes]) -> int:
        return len(self.engines[int(address)].cached.intersection(hashes))

    def run(self, name: str, length: int, number: int = 0) -> Session:
        """A whole turn of a second, on its home, or on this engine if there is none."""
        home = self.sessions.home(path(name, length))
        table = self.tables[self.engines[number] if home is None else home]  # type: ignore[index]
        turn = self.sessions.arrive(path(name, length))
        if not turn.is_first:
            table.admit(turn, self.now)
        table.start(turn, self.now)
        self.now += 1
        table.end(turn, (), self.now)
        return turn.session

    def resident(self, name: str, length: int, number: int = 0) -> Session:
        """A session with a place on this engine."""
        self.run(name, length - 1, number)
        session = self.run(name, length, number)
        assert session.home is self.tables[self.engines[number]].places
        return session

    def place(self, name: str, length: int) -> bool:
        turn = self.sessions.expect(path(name, length))
        assert turn is not None
        return self.sessions.place(turn)

    def wait(self, turn: Turn) -> float:
        """The turn waits for a place from now on."""
        self.sessions.waiting[turn] = self.now
        self.sessions.tick()
        return self.now

    def home(self, name: str, length: int) -> str | None:
        home = self.sessions.home(path(name, length))
        return None if home is None else home.address


def test_a_turn_of_a_resident_that_has_outgrown_the_cache_waits() -> None:
    model = Model(100)
    model.resident("a", 40)
    model.resident("b", 40)
    for length, passes in ((50, True), (70, False)):
        turn = model.sessions.expect(path("b", length))
        assert turn is not None
        assert model.sessions.passes(turn) is passes
    assert not model.place("b", 70)


def test_a_session_gets_a_place_where_it_fits() -> None:
    model = Model(50, 100)
    model.resident("a", 40)
    model.run("b", 20)
    assert model.place("b", 22)
    assert model.home("b", 22) == "1"


def test_a_session_may_fit_if_one_engine_is_large_enough() -> None:
    model = Model(50, 100)
    model.resident("a", 40)
    model.run("b", 20)
    small, large = (model.sessions.expect(path("b", length)) for length in (80, 120))
    assert small is not None
    assert large is not None
    assert (model.sessions.may_fit(small), model.sessions.may_fit(large)) == (True, False)
    model.engines[1].usable = False
    assert not model.sessions.may_fit(small)


def test_first_turns_never_wait() -> None:
    model = Model(100)
    model.resident("a", 90)
    for number in range(1000):
        assert model.sessions.expect(path(f"new {number}", 80)) is None
        model.run(f"new {number}", 80)


def test_of_engines_where_it_fits_it_gets_the_one_that_has_most_of_its_prompt() -> None:
    model = Model(100, 200, 100)
    model.run("a", 20)
    model.engines[2].cached.update(path("a", 20))
    assert model.place("a", 22)
    assert model.home("a", 22) == "2"


def test_of_engines_that_have_as_much_it_gets_the_one_with_most_room() -> None:
    model = Model(100, 100)
    model.resident("a", 40)
    model.run("b", 20)
    assert model.place("b", 22)
    assert model.home("b", 22) == "1"


def test_residents_that_hardly_come_back_leave_only_where_no_engine_has_room() -> None:
    model = Model(50, 50)
    gone = model.resident("a", 40)
    model.engines[0].cached.update(path("b", 20))
    model.run("b", 20)
    model.now += 1000
    assert model.place("b", 22)
    assert gone.is_resident
    assert model.home("b", 22) == "1"
    model.run("c", 30)
    assert model.place("c", 32)
    assert not gone.is_resident


def test_a_session_that_fits_nowhere_waits_for_the_first_engine_whose_places_have_cost_enough() -> None:
    model = Model(50, 50)
    dear, cheap = model.resident("a", 40, 0), model.resident("b", 30, 1)
    dear.means.gap = cheap.means.gap = 1000.0
    model.run("c", 28)
    turn = model.sessions.expect(path("c", 30))
    assert turn is not None
    assert not model.sessions.place(turn)
    since = model.wait(turn)
    while not model.sessions.admits(turn, since):
        model.now += 0.5
        model.sessions.tick()
    assert model.now - since == 30 / RATE
    assert not cheap.is_resident
    assert model.home("c", 30) == "1"


@pytest.mark.parametrize(("rate", "seconds"), [(0.0, 2.0), (500.0, 4.0)])
def test_an_engine_that_has_not_measured_its_rate_computes_1000_tokens_a_second(rate: float, seconds: float) -> None:
    model = Model(2500)
    model.engines[0].load_stats.prefill_tokens_per_second = rate
    model.resident("a", 2000).means.gap = 1000.0
    model.run("b", 1000)
    turn = model.sessions.expect(path("b", 1002))
    assert turn is not None
    since = model.wait(turn)
    while not model.sessions.admits(turn, since):
        model.now += 0.5
        model.sessions.tick()
    assert model.now - since == seconds


def test_one_resident_leaves_for_the_head_of_the_queue_and_not_one_on_each_engine() -> None:
    model = Model(50, 50)
    residents = [model.resident("a", 40, 0), model.resident("b", 40, 1)]
    running = [model.sessions.arrive(path(name, 41)) for name in ("a", "b")]
    for turn, table in zip(running, model.tables.values(), strict=True):
        table.start(turn, model.now)
    model.run("c", 30)
    waiting = model.sessions.expect(path("c", 32))
    assert waiting is not None
    since = model.wait(waiting)
    while model.now < since + HEAD_SECONDS + 60:
        model.sessions.tick()
        assert not model.sessions.admits(waiting, since)
        model.now += 1
    assert sum(each.must_leave for each in residents) == 1


def test_sessions_of_an_engine_that_drains_get_places_on_others_the_next_ones_first() -> None:
    model = Model(100, 50)
    late, soon = model.resident("late", 30), model.resident("soon", 30)
    model.engines[0].usable = False
    model.sessions.evacuate(model.engines[0])
    assert (model.home("soon", 32), model.home("late", 32)) == ("1", None)
    assert (late.is_resident, soon.is_resident) == (False, True)
    assert not model.tables[model.engines[0]].places.held
    assert not model.place("late", 32)


def test_sessions_that_hardly_come_back_are_not_moved() -> None:
    model = Model(100, 100)
    gone = model.resident("a", 30)
    model.now += 1000
    model.engines[0].usable = False
    model.sessions.evacuate(model.engines[0])
    assert not gone.is_resident


def test_a_turn_that_runs_on_an_engine_that_is_lost_ends_with_a_place_on_another() -> None:
    model = Model(100, 100)
    session = model.resident("a", 30)
    lost = model.tables[model.engines[0]]
    turn = model.sessions.arrive(path("a", 32))
    lost.start(turn, model.now)
    model.engines[0].usable = False
    model.sessions.remove(model.engines[0])
    lost.end(turn, [b"output"], model.now)
    assert session.path == [*path("a", 32), b"output"]
    assert model.home("a", 34) == "1"
    assert len(model.tables[model.engines[1]].places.held) == 33


def test_a_turn_that_is_sent_elsewhere_moves_its_session_if_that_fits() -> None:
    model = Model(100, 100, 20)
    session = model.resident("a", 30)
    turn = model.sessions.arrive(path("a", 32))
    assert not model.tables[model.engines[2]].admit(turn, model.now)
    assert model.home("a", 34) == "0"
    assert model.tables[model.engines[1]].admit(turn, model.now)
    assert session.home is model.tables[model.engines[1]].places
    assert not model.tables[model.engines[0]].places.held


def test_how_long_a_turn_waits_is_no_part_of_a_sessions_gap() -> None:
    model = Model(50)
    session = model.resident("a", 20)
    model.now += 1
    model.sessions.expect(path("a", 22))
    model.now += 60
    model.run("a", 22)
    assert session.means.gap < 1.1


def test_a_request_that_is_sent_again_is_the_same_turn() -> None:
    info = model_info(block_size=4, num_gpu_blocks=50)
    sessions = EngineSessions(Engine("0"), info, Model().sessions, lambda: 0.0, lambda: None)
    first = sessions.begin(request(14), path("a", 3), None)
    assert first is not None
    first.end([1])
    again = sessions.begin(request(14), path("a", 3), first)
    assert again is not None
    assert again.turn is first.turn
    assert again.turn.session.num_turns == 1


@pytest.mark.parametrize(("num_host_blocks", "capacity"), [(0, 50), (30, 50), (200, 200)])
def test_sessions_have_places_in_host_memory_if_that_is_larger(num_host_blocks: int, capacity: int) -> None:
    model = Model()
    info = model_info(block_size=1, num_gpu_blocks=50, num_host_blocks=num_host_blocks)
    sessions = EngineSessions(Engine("0"), info, model.sessions, lambda: 0.0, lambda: None)
    for length in (10, 20):
        running = sessions.begin(request(length), path("a", length), None)
        assert running is not None
        running.end([1])
    assert model.sessions.capacity == capacity / 20


def test_a_turn_is_sent_to_its_home_unless_that_is_overloaded() -> None:
    router, info = Router("prefix", on_room=lambda: None), model_info(block_size=1, num_gpu_blocks=50)
    one, two = engines = [Engine("one"), Engine("two")]
    home, _ = (router.new_sessions(engine, info) for engine in engines)
    assert home is not None
    for length in (10, 20):
        running = home.begin(request(length), path("a", length), None)
        assert running is not None
        running.end([1])
    candidates = {engine.address: engine for engine in engines}
    hints = RoutingHints(path("a", 30), hash_chain(info), 30)
    one.load = 16
    assert router.choose(info.model_name, candidates, hints) is one
    assert router.choose(info.model_name, {"two": two}, hints) is two
    assert router.choose("another", candidates, hints) is two
    one.load = 17
    assert router.choose(info.model_name, candidates, hints) is two


@pytest.mark.parametrize("seconds", [-86_400.0, 86_400.0])
def test_jumps_of_the_wall_clock_change_no_place(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    wall_clock = [1e9]
    monkeypatch.setattr(time, "time", lambda: wall_clock[-1])
    router = Router("prefix", on_room=lambda: None)
    sessions = router.new_sessions(Engine("one"), model_info(block_size=1, num_gpu_blocks=50))
    assert sessions is not None

    def is_retained(name: str, length: int) -> bool:
        running = sessions.begin(request(length), path(name, length), None)
        assert running is not None
        running.end([1])
        return running.retain

    assert [is_retained("a", 10), is_retained("a", 30), is_retained("b", 18)] == [False, True, False]
    wall_clock.append(1e9 + seconds)
    assert [is_retained("b", 28), is_retained("a", 32)] == [False, True]


def test_a_session_that_another_gateway_serves_has_its_place_here_too() -> None:
    model = Model(50)
    model.resident("a", 40)
    model.run("b", 20)
    known, longer = (model.sessions.expect(path("b", length)) for length in (24, 28))
    assert known is not None
    assert longer is not None
    model.engines[0].cached.update(path("b", 20))
    assert not model.sessions.passes(known)
    model.engines[0].cached.update(path("b", 26))
    assert model.sessions.passes(longer)
    assert model.home("b", 30) == "0"


def test_what_other_gateways_claim_is_not_given_away() -> None:
    model = Model(100)
    model.run("a", 40)
    model.sessions.observe(model.engines[0], 60, 0.0)
    assert not model.place("a", 42)
    model.sessions.observe(model.engines[0], 30, 0.0)
    assert model.place("a", 42)
    assert model.sessions.claim(model.engines[0]) == SessionClaim(42, 0.0)


def test_residents_leave_for_their_share_of_what_gateways_claim_beyond_the_cache() -> None:
    model = Model(100)
    first, last = model.resident("a", 30), model.resident("b", 30)
    model.sessions.observe(model.engines[0], 60, 0.0)
    model.run("a", 31)
    assert (first.is_resident, last.is_resident) == (True, False)


def test_residents_leave_for_turns_that_have_waited_longer_in_another_gateway() -> None:
    model = Model(100)
    resident = model.resident("a", 30)
    resident.means.gap = 1000.0
    engine, since = model.engines[0], model.now
    model.sessions.observe(engine, 60, 0.5)
    while resident.is_resident:
        model.sessions.tick()
        model.now += 0.5
    assert model.now - since > 30 / RATE
    assert model.sessions.claim(engine) == SessionClaim(0, 0.0)


def test_no_turn_is_admitted_before_one_that_has_waited_longer_in_another_gateway() -> None:
    model = Model(100)
    model.run("a", 30)
    turn = model.sessions.expect(path("a", 32))
    assert turn is not None
    model.sessions.observe(model.engines[0], 0, 5.0)
    since = model.wait(turn)
    assert not model.sessions.admits(turn, since)
    model.now += 6
    assert model.sessions.claim(model.engines[0]) == SessionClaim(0, 6.0)
    assert model.sessions.admits(turn, since)
