"""The simulation of sessions, seeded: with places there are more turns an hour, and gateways share a cache."""

from dataclasses import replace

import pytest

from benchmarks.routing.session_sim import Figures, Mode, Simulation
from proa_cli.bench.session_options import SessionOptions
from proa_cli.bench.session_plans import Evenly, OneShots

OPTIONS = SessionOptions(  # prompts of a sixth of the defaults
    session_shared_len=2400, session_first_len=Evenly(400, 2000), session_growth=Evenly(100, 500)
)
CAPACITY, RATE = 60_000, 3_500
SECONDS = 900.0


def simulation(mode: Mode, sessions: int, *, num_gateways: int = 1) -> Simulation:
    return Simulation(mode, replace(OPTIONS, sessions=sessions), CAPACITY, RATE, seed=0, num_gateways=num_gateways)


def cached_of_ideal(figures: Figures) -> float:
    return figures.hit_blocks / figures.ideal_blocks


def median_ttft(figures: Figures) -> float:
    return sorted(figures.ttfts)[len(figures.ttfts) // 2]


def test_sessions_that_fit_lose_nothing() -> None:
    before, after = (simulation(mode, 5).run(SECONDS) for mode in ("off", "wait"))
    assert after.turns == before.turns
    assert cached_of_ideal(after) > 0.99


@pytest.mark.parametrize(("sessions", "more_turns"), [(16, 1.15), (24, 1.25)])
def test_sessions_that_do_not_fit_have_more_turns(sessions: int, more_turns: float) -> None:
    before, after = (simulation(mode, sessions).run(SECONDS) for mode in ("off", "wait"))
    assert after.turns > more_turns * before.turns
    assert cached_of_ideal(after) > 0.88
    assert median_ttft(after) < 0.2


def test_without_waiting_there_are_no_fewer_turns() -> None:
    before, after = (simulation(mode, 24).run(SECONDS) for mode in ("off", "retain"))
    assert after.turns > before.turns


@pytest.mark.parametrize("sessions", [16, 24])
def test_three_gateways_have_nearly_the_turns_of_one(sessions: int) -> None:
    one, three = (simulation("wait", sessions, num_gateways=number).run(SECONDS) for number in (1, 3))
    assert three.turns > 0.92 * one.turns


@pytest.mark.parametrize("mode", ["off", "retain", "wait"])
def test_what_other_prompts_share_finds_room_when_sessions_have_ended(mode: Mode) -> None:
    short = replace(OPTIONS, session_turns=Evenly(12, 12), session_gap=Evenly(1, 1))
    options = replace(short, sessions=8, session_one_shots=OneShots(0.5, 2000))
    figures = Simulation(mode, options, CAPACITY, RATE, seed=0, num_documents=12, until=60.0).run(SECONDS)
    assert figures.one_shot_hits > 0.85 * figures.one_shot_blocks


def test_two_gateways_do_not_retain_more_than_the_cache() -> None:
    run = simulation("wait", 24, num_gateways=2)
    claimed = list[int]()

    def look() -> None:
        held = [gateway.places(engine).held for gateway in run.gateways for engine in run.engines]
        claimed.append(len(set[bytes]().union(*held)))

    run.every(0.1, look)
    run.run(SECONDS)
    assert 0.9 * CAPACITY < 64 * max(claimed) <= CAPACITY
