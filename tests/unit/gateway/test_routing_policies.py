"""The score, and the policies over it."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from proa_gateway.cli import main
from proa_gateway.routing.index import PrefixIndex
from proa_gateway.routing.policies import POLICIES, Policy, make_policy
from proa_gateway.routing.score import Weights, best, is_overloaded
from proa_gateway.types import BlockChain, RoutingHints

CHAIN = BlockChain(b"root", 16)
BLOCKS = [b"%d" % number for number in range(8)]
WEIGHTS = Weights(prefix=1.0, load=0.5, kv_usage=0.1, overload=16, overload_factor=2.0)


@dataclass
class Engine:
    address: str
    load: int = 0
    kv_cache_usage: float = 0.0


def make_engines(*loads: int) -> list[Engine]:
    return [Engine(f"engine-{number}:1", load) for number, load in enumerate(loads)]


def by_address(engines: list[Engine]) -> dict[str, Engine]:
    return {engine.address: engine for engine in engines}


def make_routing_hints(num_tokens: int = 129) -> RoutingHints:
    return RoutingHints(BLOCKS[: num_tokens // 16], CHAIN, num_tokens)


@pytest.mark.parametrize("seed", range(300))
def test_the_best_is_who_has_the_best_of_all_scores(seed: int) -> None:
    """A score is what the cache saves less what load and usage cost."""
    rng = random.Random(seed)
    engines = [
        Engine(f"{number}", rng.randrange(rng.choice((1, 4, 60))), rng.choice((0.0, 0.5, rng.random())))
        for number in range(rng.randrange(1, 12))
    ]
    counts = {engine.address: rng.choice((0, 3, 5, 8)) for engine in engines} | {"not a candidate": 8}
    matched = [(count, [address for address in counts if counts[address] == count]) for count in (8, 5, 3)]
    mean = sum([engine.load for engine in engines]) / len(engines)
    scores = {
        engine.address: counts[engine.address] / 8
        - 0.5 * (engine.load - mean) / max(1.0, mean)
        - 0.1 * engine.kv_cache_usage
        for engine in engines
    }
    chosen = best(by_address(engines), matched, 8, WEIGHTS, rng)
    assert scores[chosen.address] == pytest.approx(max(scores.values()))


@pytest.mark.parametrize("holders", [[], ["engine-0:1", "engine-2:1"], ["engine-0:1", "engine-1:1", "engine-2:1"]])
def test_equals_are_drawn_from(holders: list[str]) -> None:
    engines = make_engines(0, 1, 0)
    rng = random.Random(1)
    matched = [(4, holders)] if holders else []
    drawn = Counter(best(by_address(engines), matched, 8, WEIGHTS, rng).address for _ in range(200))
    assert drawn.keys() == {"engine-0:1", "engine-2:1"}
    assert min(drawn.values()) > 60


@pytest.mark.parametrize(
    ("load", "least", "is_too_much"), [(17, 0, True), (16, 0, False), (60, 40, False), (81, 40, True)]
)
def test_an_engine_is_overloaded_only_by_number_and_by_factor(load: int, least: int, is_too_much: bool) -> None:
    assert is_overloaded(Engine("a", load), least, WEIGHTS) == is_too_much


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_has_its_name_and_takes_the_only_candidate(name: str) -> None:
    policy = make_policy(name, PrefixIndex(), random.Random(1), lambda: 0.0)
    assert policy.name == name
    for wish in (RoutingHints(), make_routing_hints(), RoutingHints(session="me")):
        assert policy.choose(by_address(make_engines(5)), wish).address == "engine-0:1"
        policy.sent("engine-0:1", wish)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="'fastest'; there are prefix, least-load, round-robin, session"):
        make_policy("fastest", PrefixIndex(), random.Random(1), lambda: 0.0)


def test_the_command_line_refuses_an_unknown_policy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["serve", "--engine", "engine:1", "--routing", "fastest"])
    assert left.value.code == 2
    assert "'fastest'" in capsys.readouterr().err


def test_round_robin_takes_turns() -> None:
    policy = make_policy("round-robin", PrefixIndex(), random.Random(1), lambda: 0.0)
    engines = make_engines(9, 0, 5)
    chosen = [policy.choose(by_address(engines), RoutingHints()).address for _ in range(6)]
    assert chosen[:3] == chosen[3:]
    assert len(set(chosen)) == 3


def test_least_load_takes_the_least_loaded() -> None:
    policy = make_policy("least-load", PrefixIndex(), random.Random(1), lambda: 0.0)
    assert policy.choose(by_address(make_engines(3, 1, 2)), RoutingHints()).address == "engine-1:1"


def test_prefix_goes_where_the_prompt_was_sent_before() -> None:
    policy, engines = _prefix_policy(0, 0, 0, 0)
    first = policy.choose(by_address(engines), make_routing_hints())
    assert policy.sent(first.address, make_routing_hints()) == 0
    first.load += 1
    for _ in range(10):
        assert policy.choose(by_address(engines), make_routing_hints()) is first
    assert policy.sent(first.address, make_routing_hints()) == 128


def test_a_burst_of_one_prompt_stays_together_before_any_engine_says_anything() -> None:
    policy, engines = _prefix_policy(*[0] * 64)
    expected: dict[str, list[int]] = {}
    for _ in range(40):
        chosen = policy.choose(by_address(engines), make_routing_hints())
        expected.setdefault(chosen.address, []).append(policy.sent(chosen.address, make_routing_hints()))
        chosen.load += 1
    assert len(expected) == 10, "four a piece: then an idle engine costs less"
    assert all(cached == [0, 128, 128, 128] for cached in expected.values())


def test_prefix_without_anything_cached_goes_to_the_least_loaded() -> None:
    policy, engines = _prefix_policy(3, 1, 2)
    assert policy.choose(by_address(engines), make_routing_hints()) is engines[1]


def test_prefix_leaves_a_loaded_engine_for_what_costs_less_than_waiting() -> None:
    policy, engines = _prefix_policy(0, 0)
    policy.sent(engines[0].address, make_routing_hints())
    engines[0].load, engines[1].load = 8, 4
    assert policy.choose(by_address(engines), make_routing_hints()) is engines[0]
    engines[0].load, engines[1].load = 40, 1
    assert policy.choose(by_address(engines), make_routing_hints()) is engines[1]


def test_a_prompt_of_whole_blocks_leaves_its_last_one_to_compute() -> None:
    policy, engines = _prefix_policy(0)
    policy.sent(engines[0].address, make_routing_hints(128))
    assert policy.sent(engines[0].address, make_routing_hints(128)) == 112
    assert policy.sent(engines[0].address, make_routing_hints(129)) == 128


def test_a_session_stays_where_it_is_in_every_gateway() -> None:
    engines = make_engines(*[0] * 16)
    policies = [make_policy("session", PrefixIndex(), random.Random(seed), lambda: 0.0) for seed in range(3)]
    homes: Counter[str] = Counter()
    for number in range(640):
        wish = RoutingHints(session=f"user {number}")
        home, *others = [policy.choose(by_address(engines), wish) for policy in policies]
        assert all(other is home for other in others)
        homes[home.address] += 1
    assert min(homes.values()) > 20, "shares are about equal"
    assert max(homes.values()) < 70


def test_an_engine_that_leaves_moves_its_own_sessions_only() -> None:
    policy = make_policy("session", PrefixIndex(), random.Random(1), lambda: 0.0)
    engines = make_engines(*[0] * 8)
    for number in range(200):
        wish = RoutingHints(session=str(number))
        before, after = policy.choose(by_address(engines), wish), policy.choose(by_address(engines[1:]), wish)
        assert after is before or before is engines[0]


def test_a_session_moves_on_where_its_engine_has_more_than_its_share() -> None:
    policy = make_policy("session", PrefixIndex(), random.Random(1), lambda: 0.0)
    engines = make_engines(4, 4, 4, 4)
    wish = RoutingHints(session="me")
    home = policy.choose(by_address(engines), wish)
    home.load = 30
    moved = policy.choose(by_address(engines), wish)
    assert moved is not home
    home.load = 4
    assert policy.choose(by_address(engines), wish) is home


def _prefix_policy(*loads: int) -> tuple[Policy, list[Engine]]:
    index = PrefixIndex()
    engines = make_engines(*loads)
    for engine in engines:
        index.add(engine.address, CHAIN, 100)
    return make_policy("prefix", index, random.Random(1), lambda: 0.0), engines
