"""Sessions are found by the blocks of their prompts, have places in an engine's cache, and give them up for others."""

import random
from collections import deque
from collections.abc import Sequence

import pytest

from proa_gateway.sessions.identities import Identities
from proa_gateway.sessions.places import Places
from proa_gateway.sessions.session import MAX_MARKS, Session, Turn
from proa_gateway.sessions.session_table import HEAD_SECONDS, SessionTable


def path(name: str, length: int, *, shared: int = 0) -> list[bytes]:
    """Blocks of a conversation, the first ones of all conversations."""
    return [(f"shared {index}" if index < shared else f"{name} {index}").encode() for index in range(length)]


def sent(identities: Identities, hashes: Sequence[bytes], *, runs: bool = False) -> Session:
    session = identities.arrive(hashes)
    session.begin(hashes, 0.0, identities.means)
    identities.mark(session, hashes)
    session.num_running += runs
    return session


def test_a_next_turn_is_found_without_an_id() -> None:
    identities = Identities()
    one, two = sent(identities, path("a", 3)), sent(identities, path("b", 3))
    assert one is not two
    assert identities.find(path("a", 4)) is one
    assert identities.find(path("b", 9)) is two
    assert identities.find(path("c", 3)) is None


def test_a_repeated_prompt_is_no_next_turn() -> None:
    identities = Identities()
    sent(identities, path("a", 3))
    assert identities.find(path("a", 3)) is None


@pytest.mark.parametrize("runs", [False, True])
def test_a_turn_whose_end_was_edited_is_the_same_session_unless_that_runs(runs: bool) -> None:
    identities = Identities()
    session = sent(identities, path("a", 3))
    assert sent(identities, path("a", 6), runs=runs) is session
    edited = [*path("a", 5), b"edited", b"more"]
    assert (identities.find(edited) is session) is not runs


def test_a_branch_beside_a_running_turn_is_a_session_of_its_own() -> None:
    identities = Identities()
    session = sent(identities, path("a", 3), runs=True)
    branch = sent(identities, [*path("a", 3), b"branch"])
    assert branch is not session
    assert identities.find([*path("a", 3), b"branch", b"more"]) is branch


def test_a_block_that_ends_prompts_of_many_sessions_is_no_mark() -> None:
    identities = Identities()
    system = path("system", 2)
    first = sent(identities, system)
    for name in ("a", "b", "c", "d"):
        sent(identities, [*system, f"{name} 1".encode(), f"{name} 2".encode()])
    assert identities.find([*system, b"new", b"newer"]) is not first
    assert identities.find([*system, b"a 1", b"a 2", b"a 3"])


def test_the_first_session_with_an_id_is_the_parent_of_others_until_it_is_forgotten() -> None:
    identities = Identities()
    first, second, other = (identities.arrive(path(each[0], 3), each[1]) for each in ("ax", "bx", "cy"))
    assert (first.parent, second.parent, other.parent) == (None, first, None)
    identities.mark(first, path("a", 3))
    identities.forget(first)
    third, fourth = (identities.arrive(path(name, 3), "x") for name in "de")
    assert (third.parent, fourth.parent) == (None, third)


def test_a_session_keeps_its_newest_marks() -> None:
    identities = Identities()
    for length in range(1, MAX_MARKS + 10):
        session = sent(identities, path("a", length))
    assert len(session.marks) == MAX_MARKS
    assert identities.find([*path("a", 5), b"else", b"more"]) is not session


def test_what_residents_share_counts_once() -> None:
    places = Places(100)
    for name in ("a", "b"):
        session = Session(Identities().means)
        places.admit(session, path(name, 10, shared=6))
    assert len(places.held) == 14
    assert places.missing(path("c", 10, shared=6)) == 4
    places.leave(session)
    assert places.take_released() == path("b", 10, shared=6)[6:]
    assert len(places.held) == 10


def test_what_a_next_turn_renders_anew_is_released() -> None:
    places, session = Places(100), Session(Identities().means)
    places.admit(session, path("a", 10))
    places.move(session, [*path("a", 7), b"new 7", b"new 8"])
    assert places.take_released() == path("a", 10)[7:]


def arrive(identities: Identities, hashes: Sequence[bytes], now: float) -> Turn:
    session = identities.arrive(hashes)
    is_first = not session.num_turns
    session.begin(hashes, now, identities.means)
    return Turn(session, hashes, is_first)


class Engine:
    """A table, and the turns that run."""

    def __init__(self, capacity: int = 100, rate: float = 10.0) -> None:
        self.identities, self.rate, self.now = Identities(), rate, 0.0
        self.table = SessionTable(capacity, self.identities)

    def arrive(self, hashes: Sequence[bytes]) -> Turn:
        return arrive(self.identities, hashes, self.now)

    def run(self, hashes: Sequence[bytes]) -> Turn:
        """A whole turn of a second, with a place if there is one."""
        turn = self.arrive(hashes)
        if not turn.is_first:
            self.table.admit(turn, self.now)
        self.table.start(turn, self.now)
        self.now += 1
        self.table.end(turn, (), self.now)
        return turn

    def resident(self, name: str, length: int) -> Session:
        """A session with a place and this many blocks."""
        self.run(path(name, 2))
        session = self.run(path(name, length)).session
        assert session.is_resident
        return session


def test_a_session_gets_a_place_with_its_second_turn_if_there_is_room() -> None:
    engine = Engine()
    first = engine.run(path("a", 40)).session
    assert (first.is_resident, len(first.path), first.num_blocks) == (False, 0, 40)  # its blocks are not kept
    assert engine.run(path("a", 42)).session.is_resident
    engine.run(path("b", 60))
    assert not engine.run(path("b", 62)).session.is_resident


def test_blocks_of_running_first_turns_are_not_given_away() -> None:
    engine = Engine()
    engine.run(path("a", 40))
    first = engine.arrive(path("b", 60))
    engine.table.start(first, engine.now)
    assert not engine.run(path("a", 42)).session.is_resident
    engine.table.end(first, (), engine.now)
    assert engine.run(path("a", 44)).session.is_resident


def test_sessions_that_hardly_come_back_leave_for_others() -> None:
    engine = Engine()
    gone = engine.resident("a", 60)
    engine.run(path("b", 50))
    engine.now += 1000
    assert engine.run(path("b", 52)).session.is_resident
    assert not gone.is_resident
    assert engine.table.places.ended_size == 60


def test_sessions_that_hardly_come_back_leave_while_first_turns_run() -> None:
    engine = Engine()
    gone = engine.resident("a", 60)
    engine.now += 1000
    engine.table.tick(engine.now, waiting=[], is_busy=False)
    assert gone.is_resident
    engine.table.start(engine.arrive(path("b", 5)), engine.now)
    engine.table.tick(engine.now, waiting=[], is_busy=False)
    assert not gone.is_resident
    assert engine.table.places.take_released() == path("a", 60)


def test_of_residents_that_outgrow_the_cache_the_last_admitted_leaves() -> None:
    engine = Engine()
    first, last = engine.resident("a", 40), engine.resident("b", 40)
    assert engine.run(path("a", 70)).session is first
    assert (first.is_resident, last.is_resident) == (True, False)


@pytest.mark.parametrize(("length", "is_full"), [(54, False), (60, True)])
def test_of_residents_that_fill_the_cache_an_idle_one_leaves_before_running_ones(length: int, is_full: bool) -> None:
    engine = Engine(capacity=100)
    idle, running = engine.resident("a", 40), engine.resident("b", 40)
    engine.table.start(engine.arrive(path("b", 42)), engine.now)
    engine.table.places.make_room(engine.now, engine.identities.means, path("a", length))
    assert (idle.is_resident, running.must_leave) == (not is_full, not is_full)


def test_one_session_larger_than_the_cache_keeps_its_place() -> None:
    engine = Engine()
    session = engine.resident("a", 60)
    engine.run(path("a", 150))
    assert session.is_resident


def test_idle_residents_leave_once_their_places_have_cost_their_price() -> None:
    engine = Engine(rate=10.0)  # blocks a second: 6 seconds for the resident
    resident = engine.resident("a", 60)
    engine.run(path("b", 50))
    turn = engine.arrive(path("b", 52))
    waited = 0.0
    engine.table.tick(engine.now, waiting=[turn.session], is_busy=False)
    while not engine.table.displace(turn, engine.now, engine.rate, engine.now):
        engine.now, waited = engine.now + 0.5, waited + 0.5
        engine.table.tick(engine.now, waiting=[turn.session], is_busy=False)
    assert waited == pytest.approx(6.0)
    assert (resident.is_resident, turn.session.is_resident) == (False, True)


def test_an_idle_resident_that_comes_back_sooner_than_it_could_be_computed_again_stays() -> None:
    engine = Engine(rate=50.0)  # 1.2 seconds for the resident
    resident = engine.resident("a", 60)
    resident.means.gap = 2.0
    engine.run(path("b", 50))
    turn = engine.arrive(path("b", 52))
    engine.table.tick(engine.now, waiting=[turn.session], is_busy=False)
    resident.idle_since, engine.now = engine.now + 99.0, engine.now + 100
    engine.table.tick(engine.now, waiting=[turn.session], is_busy=False)  # places have cost enough
    assert not engine.table.displace(turn, engine.now, engine.rate, engine.now)
    resident.means.gap = 2.5
    assert engine.table.displace(turn, engine.now, engine.rate, engine.now)


def test_a_place_that_others_give_up_leaves_those_that_stay_room_to_grow() -> None:
    engine = Engine()
    staying, leaving = engine.resident("a", 60), engine.resident("b", 20)
    turn = engine.run(path("c", 30))
    for growth, fits in ((2.0, True), (20.0, False)):
        staying.means.growth = growth
        assert engine.table.places.fits_without([leaving], turn.session, turn.hashes) is fits


def test_the_place_of_a_session_costs_nothing_while_its_sub_agent_waits() -> None:
    engine = Engine(rate=1000.0)
    parent = engine.resident("a", 60)
    engine.run(path("b", 50))
    turn = engine.arrive(path("b", 52))
    turn.session.parent, parent.means.gap = parent, 0.0
    for has_cost in (False, True):
        for _ in range(2):
            engine.now += 1
            engine.table.tick(engine.now, waiting=[turn.session], is_busy=False)
        assert engine.table.displace(turn, engine.now, engine.rate, engine.now) is has_cost
        turn.session.parent = None


def test_places_cost_nothing_while_the_engine_has_prompts_to_compute() -> None:
    engine = Engine()
    engine.resident("a", 60)
    engine.run(path("b", 50))
    turn = engine.arrive(path("b", 52))
    for _ in range(100):
        engine.table.tick(engine.now, waiting=[turn.session], is_busy=True)
        engine.now += 1
    assert not engine.table.displace(turn, engine.now, engine.rate, engine.now)


def test_a_running_resident_leaves_at_its_turns_end_for_one_that_has_waited_long() -> None:
    engine = Engine(rate=60.0)
    resident = engine.resident("a", 60)
    running = engine.arrive(path("a", 61))
    engine.table.start(running, engine.now)
    engine.run(path("b", 50))
    turn, since = engine.arrive(path("b", 52)), engine.now
    while engine.now < since + HEAD_SECONDS + 1:
        engine.table.tick(engine.now, waiting=[turn.session], is_busy=True)
        assert not engine.table.displace(turn, engine.now, engine.rate, since)
        has_waited_long = engine.now - since >= HEAD_SECONDS
        assert engine.table.rotate(engine.now, engine.rate, since) is has_waited_long
        engine.now += 1
    assert resident.is_resident
    engine.table.end(running, (), engine.now)
    assert not resident.is_resident
    assert engine.table.admit(turn, engine.now)


@pytest.mark.parametrize("seed", range(10))
def test_what_is_spent_on_computing_again_is_at_most_what_places_have_wasted(seed: int) -> None:
    """And a tenth of the time, for those that have waited long."""
    rng, rate, now, head_since = random.Random(seed), 10.0, 0.0, 0.0
    identities = Identities()
    table, lengths = SessionTable(100, identities, rotation=0.1), dict.fromkeys("abcdef", 5)
    running, may_spend, spent = deque[Turn](), 0.0, 0.0
    for _ in range(600):
        name = rng.choice(list(lengths))
        lengths[name] = 5 if lengths[name] > 80 else lengths[name] + rng.randint(1, 8)
        turn = arrive(identities, path(name, lengths[name]), now)
        if not turn.is_first and not table.admit(turn, now):
            table.tick(now, waiting=[turn.session], is_busy=False)
            for _ in range(rng.randint(1, 80)):
                now += 0.5
                is_busy, sizes = rng.random() < 0.3, {each: len(each.path) for each in table.places.residents}
                idle = sum(size for each, size in sizes.items() if not each.num_running)
                may_spend += 0.05 + (0.0 if is_busy else 0.5 * idle / max(sum(sizes.values()), 1))
                table.tick(now, waiting=[turn.session], is_busy=is_busy)
                residents = dict(table.places.residents)
                marked = {each for each in residents if each.must_leave}
                is_admitted = table.displace(turn, now, rate, head_since)
                if not is_admitted:
                    table.rotate(now, rate, head_since)
                left = [each for each in residents if not each.is_resident]
                left += [each for each in residents if each.must_leave and each not in marked]
                spent += sum(sizes[each] for each in left) / rate
                assert spent <= may_spend + 1e-6
                if is_admitted:
                    break
            head_since = now
            table.tick(now, waiting=[], is_busy=False)
        table.start(turn, now)
        running.append(turn)
        now += rng.expovariate(1)
        while len(running) > rng.randint(0, 3):
            table.end(running.popleft(), (), now)
    assert spent > 10.0


def test_a_session_that_was_taken_for_gone_waits_as_others_do() -> None:
    engine = Engine(rate=10.0)
    gone = engine.resident("a", 60)
    engine.run(path("b", 50))
    engine.now += 1000
    other = engine.run(path("b", 52)).session
    turn = engine.arrive(path("a", 62))
    assert turn.session is gone
    assert not engine.table.admit(turn, engine.now)
    engine.table.tick(engine.now, waiting=[gone], is_busy=False)
    while not engine.table.displace(turn, engine.now, engine.rate, engine.now):
        engine.now += 0.5
        engine.table.tick(engine.now, waiting=[gone], is_busy=False)
    assert (gone.is_resident, other.is_resident) == (True, False)


@pytest.mark.parametrize("seed", range(20))
def test_places_are_consistent_whatever_comes(seed: int) -> None:
    """What is held are the residents' paths, and what is released no resident has."""
    rng = random.Random(seed)
    identities, now = Identities(), 0.0
    table = SessionTable(rng.randint(20, 200), identities)
    running: list[Turn] = []
    lengths, shared = dict.fromkeys("abcdefgh", 1), {name: rng.choice([0, 4]) for name in "abcdefgh"}
    for _ in range(400):
        now += rng.expovariate(1)
        if running and rng.random() < 0.5:
            turn = running.pop(rng.randrange(len(running)))
            table.end(turn, [turn.hashes[-1] + b" output"] * rng.randint(0, 1), now)
        else:
            name = rng.choice(list(lengths))
            lengths[name] = max(1, lengths[name] + rng.randint(-2, 8))
            turn = arrive(identities, path(name, lengths[name], shared=shared[name]), now)
            if not turn.is_first and not table.admit(turn, now):
                table.tick(now, waiting=[turn.session], is_busy=rng.random() < 0.3)
                head_since = now - rng.choice([0, 20])
                if not table.displace(turn, now, 10.0, head_since):
                    table.rotate(now, 10.0, head_since)
            table.start(turn, now)
            running.append(turn)
        held: dict[bytes, int] = {}
        for session in table.places.residents:
            assert session.is_resident
            for block_hash in session.path:
                held[block_hash] = held.get(block_hash, 0) + 1
        assert held == table.places.held
        assert not set(table.places.take_released()) & held.keys()
