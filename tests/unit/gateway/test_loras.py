"""Adapters in the gateway: its flag, what is known of them, and which engine a request with one is sent to."""

import random
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from proa.contract import EngineCoreRequest, Lora, SamplingParams
from proa.lora_module import LoraModule
from proa_gateway.engines.models import LoraRegistry
from proa_gateway.engines.session import Session
from proa_gateway.errors import GatewayError
from proa_gateway.routing.index import PrefixIndex
from proa_gateway.routing.policies import POLICIES, RoutingHints, lora_cost, make_policy

SQL = Lora(name="sql", path="/sql", digest="d1")


@dataclass
class Loras:
    loaded: bool = False
    active: bool = False
    has_free_slot: bool = True

    def has(self, lora: Lora) -> bool:
        return self.loaded

    def is_active(self, lora: Lora) -> bool:
        return self.active


@dataclass
class Engine:
    address: str
    load: int = 0
    kv_cache_usage: float = 0.0
    loras: Loras = field(default_factory=Loras)


ACTIVE, LOADED, FREE, NONE = (
    Loras(loaded=True, active=True),
    Loras(loaded=True),
    Loras(),
    Loras(has_free_slot=False),
)


@pytest.mark.parametrize(
    ("text", "module"),
    [
        ("sql=/adapters/sql", LoraModule(name="sql", path="/adapters/sql")),
        ("sql=/adapters/a=b", LoraModule(name="sql", path="/adapters/a=b")),
        ('{"name": "sql", "path": "/sql"}', LoraModule(name="sql", path="/sql")),
        (
            '{"name": "sql", "path": "/sql", "base_model_name": "m"}',
            LoraModule(name="sql", path="/sql", base_model_name="m"),
        ),
    ],
)
def test_a_module_is_a_name_with_a_path_or_vllms_json(text: str, module: LoraModule) -> None:
    assert LoraModule.parse(text) == module


@pytest.mark.parametrize("text", ["", "sql", "sql=", "=/sql", "{", '{"name": "sql"}', '{"name": "a", "path": 1}'])
def test_other_modules_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"needs a name and a path|JSON|must have name and path"):
        LoraModule.parse(text)


def test_an_engines_report_gives_an_operators_adapter_its_digest_but_not_another_path() -> None:
    registry = LoraRegistry([LoraModule(name="sql", path="/sql")])
    registry.learn(Lora(name="sql", path="/other", digest="d2"), "m")
    assert [each.lora.digest for each in registry] == [""]
    registry.learn(SQL, "m")
    assert [(each.lora, each.base_model) for each in registry] == [(SQL, "m")]
    registry.learn(Lora(name="sql", path="/sql", digest="d3"), "another model")
    assert [each.lora for each in registry] == [SQL]


def test_the_last_report_of_an_engine_counts_until_the_adapter_is_forgotten() -> None:
    registry = LoraRegistry()
    registry.learn(SQL, "m")
    new = Lora(name="sql", path="/new", digest="d2")
    registry.learn(new, "m")
    known = registry.get("sql")
    assert known is not None
    assert (known.lora, known.given) == (new, False)
    registry.forget("sql")
    assert registry.get("sql") is None


def test_the_cost_of_an_adapter_grows_from_active_over_loaded_and_free_slot_to_none() -> None:
    costs = [lora_cost(state, SQL) for state in (ACTIVE, LOADED, FREE, NONE)]
    assert costs == sorted(set(costs))
    assert costs[0] == 0.0


@pytest.mark.parametrize("policy", sorted({*POLICIES} - {"session"}))
def test_an_engine_that_has_the_adapter_is_preferred_to_a_less_loaded_one(policy: str) -> None:
    engines = {one.address: one for one in (Engine("a", 6, loras=ACTIVE), Engine("b", 2), Engine("c", 0))}
    chosen = make_policy(policy, PrefixIndex(), random.Random(1), lambda: 0.0)
    assert chosen.choose(engines, RoutingHints(lora=SQL)).address == "a"


def test_an_overloaded_engine_does_not_get_more_requests_for_its_adapter() -> None:
    policy = make_policy("prefix", PrefixIndex(), random.Random(1), lambda: 0.0)
    engines = {one.address: one for one in (Engine("a", 40, loras=ACTIVE), Engine("b", 8), Engine("c", 8, loras=NONE))}
    assert policy.choose(engines, RoutingHints(lora=SQL)).address == "b"
    engines["a"].load = 20
    assert policy.choose(engines, RoutingHints(lora=SQL)).address == "a"


def test_the_requests_of_an_adapter_that_all_engines_have_are_spread() -> None:
    policy = make_policy("prefix", PrefixIndex(), random.Random(1), lambda: 0.0)
    engines = {name: Engine(name, loras=Loras(loaded=True)) for name in "abcd"}
    for _ in range(32):
        chosen = policy.choose(engines, RoutingHints(lora=SQL))
        chosen.load += 1
        chosen.loras.active = True
    assert max(one.load for one in engines.values()) <= 10


class Unused:
    """Stands for what a test does not call."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was used")


class RequestCounter(Unused):
    """An engine's adapters. `ended`: the names of those whose requests have ended."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def count_request(self, name: str) -> None: ...

    def uncount_request(self, name: str) -> None:
        self.ended.append(name)


class IgnoredOutput(Unused):
    def draining(self) -> None: ...

    def failed(self, error: GatewayError, *, retryable: bool) -> None: ...


async def test_requests_left_at_the_end_of_a_session_are_not_counted_as_ended_when_they_are_aborted_later() -> None:
    counter = RequestCounter()
    session = Session(cast(Any, Unused()), cast(Any, Unused()), cast(Any, counter), heartbeat=1.0)
    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=(1,), sampling_params=SamplingParams(), lora_name="sql", lora_digest="d1"
    )
    sent = session.submit(request, cast(Any, IgnoredOutput()))
    session.close("the engine was killed")
    sent.abort()
    assert counter.ended == []
