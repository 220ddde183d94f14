"""What the external scaler counts, and which triggers it refuses."""

import asyncio
from dataclasses import dataclass

import pytest

from proa.contract import Role
from proa_gateway.scaler.demand import Demand
from proa_gateway.scaler.service import Trigger


@dataclass
class Engine:
    model_name: str | None
    load: int
    role: Role = Role.BOTH


def test_demand_is_what_waits_in_all_gateways_and_what_the_engines_of_the_model_have() -> None:
    demand = Demand([Engine("m", 3), Engine("m", 2, Role.DECODE), Engine("other", 50), Engine(None, 7)])
    demand.set_waiting("m", 4)
    demand.set_waiting("other", 100)
    demand.set_elsewhere("b", {"m": 10})
    demand.set_elsewhere("c", {"other": 1})
    assert demand.of("m", prefill=False) == 3 + 2 + 4 + 10
    assert demand.of("unknown", prefill=False) == 0
    assert demand.num_gateways == 2


def test_only_the_load_of_prefill_engines_is_demand_for_them() -> None:
    demand = Demand([Engine("m", 3), Engine("m", 5, Role.PREFILL)])
    demand.set_waiting("m", 4)
    assert demand.of("m", prefill=True) == 5
    assert demand.of("m", prefill=False) == 3 + 4


def test_what_a_gateway_held_is_forgotten_with_it() -> None:
    demand = Demand(())
    demand.set_elsewhere("b", {"m": 10})
    demand.set_elsewhere("b", {"m": 6})
    assert demand.of("m", prefill=False) == 6
    demand.forget("b")
    demand.forget("unknown")
    assert demand.of("m", prefill=False) == 0


async def test_changes_come_at_once_then_one_for_all_that_happened_until_close() -> None:
    demand = Demand(())
    changes = demand.changes()
    await anext(changes)
    demand.set_waiting("m", 1)
    demand.set_waiting("m", 2)
    async with asyncio.timeout(10):
        await anext(changes)
    waiting = asyncio.ensure_future(anext(changes, "ended"))
    demand.set_waiting("m", 2)  # as before
    await asyncio.sleep(0)
    assert not waiting.done()
    demand.close()
    async with asyncio.timeout(10):
        assert await waiting == "ended"


async def test_a_change_of_load_is_noticed_after_the_interval() -> None:
    changes = Demand(()).changes(0.01)
    async with asyncio.timeout(10):
        for _ in range(3):
            await anext(changes)
    await changes.aclose()  # type: ignore[attr-defined]


def test_a_trigger_names_model_target_and_role() -> None:
    assert Trigger.from_metadata({"model": "m"}) == Trigger("m", 1.0)
    given = {"scalerAddress": "x:1", "model": "m", "target": "2.5", "role": "prefill"}
    assert Trigger.from_metadata(given) == Trigger("m", 2.5, prefill=True)
    assert not Trigger.from_metadata({"model": "m", "role": "decode"}).prefill


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "needs the name of the model"),
        ({"model": "m", "target": "many"}, "not 'many'"),
        ({"model": "m", "target": "0"}, "not '0'"),
        ({"model": "m", "target": "nan"}, "not 'nan'"),
        ({"model": "m", "target": "inf"}, "not 'inf'"),
        ({"model": "m", "role": "leader"}, "not 'leader'"),
    ],
)
def test_a_trigger_that_cannot_be_read_is_refused(metadata: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trigger.from_metadata(metadata)
