"""Routing policies and the score that the prefix policy uses."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from proa_gateway.cli import main
from proa_gateway.engines.engine_loras import EngineLoras
from proa_gateway.routing.index import PrefixIndex, TieredIndex
from proa_gateway.routing.policies import (
    POLICIES,
    HashChain,
    Policy,
    RoutingHints,
    Weights,
    best,
    is_overloaded,
    make_policy,
)

CHAIN = HashChain(b"root", 16)
BLOCKS = [b"%d" % number for number in range(8)]
WEIGHTS = Weights(prefix=1.0, load=0.5, kv_usage=0.1, overload=16, overload_factor=2.0)


@dataclass
class Engine:
    address: str
    load: int = 0
    kv_cache_usage: float = 0.0
    loras: EngineLoras = field(default_factory=lambda: EngineLoras("", lambda lora, model: None))


def make_engines(*loads: int) -> list[Engine]:
    return [Engine(f"engine-{number}:1", load) for number, load in enumerate(loads)]


def by_address(engines: list[Engine]) -> dict[str, Engine]:
    return {engine.address: engine for engine in engines}


def prompt_hints(num_tokens: int = 129) -> RoutingHints:
    return RoutingHints(BLOCKS[: num_tokens // 16], CHAIN, num_tokens)


@pytest.mark.parametrize("seed", range(300))
def test_best_returns_the_candidate_with_the_largest_score(seed: int) -> None:
    """Against the score computed directly: share of cached blocks, less weighted load and KV cache usage."""
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


@pytest.mark.parametrize("having", [[], ["engine-0:1", "engine-2:1"], ["engine-0:1", "engine-1:1", "engine-2:1"]])
def test_ties_are_drawn_at_random(having: list[str]) -> None:
    engines = make_engines(0, 1, 0)
    rng = random.Random(1)
    matched = [(4, having)] if having else []
    drawn = Counter(best(by_address(engines), matched, 8, WEIGHTS, rng).address for _ in range(200))
    assert drawn.keys() == {"engine-0:1", "engine-2:1"}
    assert min(drawn.values()) > 60


@pytest.mark.parametrize(
    ("load", "least", "is_too_much"), [(17, 0, True), (16, 0, False), (60, 40, False), (81, 40, True)]
)
def test_an_engine_is_overloaded_only_by_number_and_by_factor(load: int, least: int, is_too_much: bool) -> None:
    assert is_overloaded(Engine("a", load), least, WEIGHTS) == is_too_much


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_chooses_the_only_candidate(name: str) -> None:
    policy = make_policy(name, PrefixIndex(), random.Random(1), lambda: 0.0)
    assert policy.name == name
    for hints in (RoutingHints(), prompt_hints(), RoutingHints(session_id="me")):
        assert policy.choose(by_address(make_engines(5)), hints).address == "engine-0:1"
        policy.record_sent("engine-0:1", hints)


def test_an_unknown_policy_name_raises() -> None:
    with pytest.raises(ValueError, match="'fastest', must be one of prefix, least-load, round-robin, session"):
        make_policy("fastest", PrefixIndex(), random.Random(1), lambda: 0.0)


def test_the_command_line_rejects_an_unknown_policy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["serve", "--engine", "engine:1", "--routing", "fastest"])
    assert exit.value.code == 2
    assert "'fastest'" in capsys.readouterr().err


def test_round_robin_chooses_each_engine_in_turn() -> None:
    policy = make_policy("round-robin", PrefixIndex(), random.Random(1), lambda: 0.0)
    engines = make_engines(9, 0, 5)
    chosen = [policy.choose(by_address(engines), RoutingHints()).address for _ in range(6)]
    assert chosen[:3] == chosen[3:]
    assert len(set(chosen)) == 3


def test_least_load_chooses_the_least_loaded_engine() -> None:
    policy = make_policy("least-load", PrefixIndex(), random.Random(1), lambda: 0.0)
    assert policy.choose(by_address(make_engines(3, 1, 2)), RoutingHints()).address == "engine-1:1"


def test_prefix_chooses_the_engine_that_the_prompt_was_sent_to_before() -> None:
    policy, engines = _prefix_policy(0, 0, 0, 0)
    first = policy.choose(by_address(engines), prompt_hints())
    assert policy.record_sent(first.address, prompt_hints()) == 0
    first.load += 1
    for _ in range(10):
        assert policy.choose(by_address(engines), prompt_hints()) is first
    assert policy.record_sent(first.address, prompt_hints()) == 128


def test_prefix_chooses_an_engine_that_would_load_before_those_that_would_compute() -> None:
    index, engines = TieredIndex(), make_engines(0, 1, 0)
    for engine in engines:
        index.add_engine(engine.address, CHAIN, 100, 100)
    index.host.add_confirmed(engines[1].address, BLOCKS)
    policy = make_policy("prefix", index, random.Random(1), lambda: 0.0)
    assert policy.choose(by_address(engines), prompt_hints()) is engines[1]


def test_a_burst_of_one_prompt_is_kept_together_before_any_kv_event() -> None:
    policy, engines = _prefix_policy(*[0] * 64)
    expected: dict[str, list[int]] = {}
    for _ in range(40):
        chosen = policy.choose(by_address(engines), prompt_hints())
        expected.setdefault(chosen.address, []).append(policy.record_sent(chosen.address, prompt_hints()))
        chosen.load += 1
    assert len(expected) == 10, "four each: then an idle engine has the better score"
    assert all(cached == [0, 128, 128, 128] for cached in expected.values())


def test_prefix_chooses_the_least_loaded_engine_if_nothing_is_cached() -> None:
    policy, engines = _prefix_policy(3, 1, 2)
    assert policy.choose(by_address(engines), prompt_hints()) is engines[1]


def test_prefix_leaves_an_engine_whose_load_outweighs_its_cache() -> None:
    policy, engines = _prefix_policy(0, 0)
    policy.record_sent(engines[0].address, prompt_hints())
    engines[0].load, engines[1].load = 8, 4
    assert policy.choose(by_address(engines), prompt_hints()) is engines[0]
    engines[0].load, engines[1].load = 40, 1
    assert policy.choose(by_address(engines), prompt_hints()) is engines[1]


def test_the_last_block_of_a_prompt_of_full_blocks_is_not_expected_to_be_cached() -> None:
    policy, engines = _prefix_policy(0)
    policy.record_sent(engines[0].address, prompt_hints(128))
    assert policy.record_sent(engines[0].address, prompt_hints(128)) == 112
    assert policy.record_sent(engines[0].address, prompt_hints(129)) == 128


def test_every_gateway_chooses_the_same_engine_for_a_session() -> None:
    engines = make_engines(*[0] * 16)
    policies = [make_policy("session", PrefixIndex(), random.Random(seed), lambda: 0.0) for seed in range(3)]
    homes: Counter[str] = Counter()
    for number in range(640):
        hints = RoutingHints(session_id=f"user {number}")
        home, *others = [policy.choose(by_address(engines), hints) for policy in policies]
        assert all(other is home for other in others)
        homes[home.address] += 1
    assert min(homes.values()) > 20, "shares are about equal"
    assert max(homes.values()) < 70


def test_removing_an_engine_moves_only_its_own_sessions() -> None:
    policy = make_policy("session", PrefixIndex(), random.Random(1), lambda: 0.0)
    engines = make_engines(*[0] * 8)
    for number in range(200):
        hints = RoutingHints(session_id=str(number))
        before, after = policy.choose(by_address(engines), hints), policy.choose(by_address(engines[1:]), hints)
        assert after is before or before is engines[0]


def test_a_session_moves_while_its_engine_exceeds_the_load_bound() -> None:
    policy = make_policy("session", PrefixIndex(), random.Random(1), lambda: 0.0)
    engines = make_engines(4, 4, 4, 4)
    hints = RoutingHints(session_id="me")
    home = policy.choose(by_address(engines), hints)
    home.load = 30
    moved = policy.choose(by_address(engines), hints)
    assert moved is not home
    home.load = 4
    assert policy.choose(by_address(engines), hints) is home


def _prefix_policy(*loads: int) -> tuple[Policy, list[Engine]]:
    index = PrefixIndex()
    engines = make_engines(*loads)
    for engine in engines:
        index.add_replica(engine.address, CHAIN, 100)
    return make_policy("prefix", index, random.Random(1), lambda: 0.0), engines
