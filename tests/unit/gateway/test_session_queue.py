"""Turns of conversations wait for places in an engine's cache; only the first one is tried, and none waits for ever."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from proa_gateway.admission.auth import Caller
from proa_gateway.admission.fair_queue import AdmissionBounds, QueuedRequest
from proa_gateway.admission.session_queue import SessionQueue
from proa_gateway.errors import ShuttingDown
from proa_gateway.observability.metrics import GatewayMetrics
from proa_gateway.scaler.demand import Demand
from proa_gateway.sessions.model_sessions import ModelSessions
from proa_gateway.sessions.session import Means, Session, Turn


class Home:
    def move(self, session: Session, path: Sequence[bytes]) -> None: ...

    def make_room(self, now: float, means: Means, path: Sequence[bytes]) -> None: ...

    def leave(self, session: Session) -> None: ...


@dataclass(eq=False)
class FakeSessions:
    """Every prompt is a later turn. `places`: how many more get one; `tried`: those for which one was asked.
    `residents`: last blocks of prompts whose conversations have places; `awaited`: of those of sub-agents, of which the
    callers have places."""

    places: int = 0
    residents: set[bytes] = field(default_factory=set)
    awaited: set[bytes] = field(default_factory=set)
    tried: list[bytes] = field(default_factory=list)
    has_engines: bool = True
    is_next: bool = True
    waiting: dict[Turn, float] = field(default_factory=dict)

    def expect(self, hashes: Sequence[bytes]) -> Turn | None:
        home = Home() if hashes[-1] in self.residents else None
        parent = Session(Means(), home=Home()) if hashes[-1] in self.awaited else None
        return Turn(Session(Means(), home=home, parent=parent), hashes, is_first=False)

    def passes(self, turn: Turn) -> bool:
        return turn.session.is_resident

    def may_fit(self, turn: Turn) -> bool:
        return turn.hashes[-1] != b"too large"

    def place(self, turn: Turn) -> bool:
        self.tried.append(turn.hashes[-1])
        if not self.places:
            return False
        self.places -= 1
        return True

    def admits(self, turn: Turn, head_since: float) -> bool:
        return self.is_next and self.place(turn)

    def tick(self) -> None: ...


class Site:
    """A queue of one model. `admitted`: turns that need not wait any more, in order."""

    def __init__(self, max_wait: float = 60.0, max_waiting: int = 10) -> None:
        self.sessions = FakeSessions()
        self.bounds = AdmissionBounds(max_requests=100, max_waiting=max_waiting, max_queued_tokens=10_000)
        self.metrics, self.demand = GatewayMetrics(CollectorRegistry()), Demand(())
        self.queue = SessionQueue(self.bounds, self.metrics, self.demand, max_wait)
        self.caller = Caller("a")
        self.admitted: list[str] = []

    def send(
        self, name: str, rank: int = 0, *, caller: Caller | None = None, num_tokens: int = 10
    ) -> "asyncio.Task[None]":
        async def wait() -> None:
            request = QueuedRequest(caller or self.caller, rank=rank, num_tokens=num_tokens, cost=num_tokens)
            self.bounds.admit(request)
            try:
                await self.queue.wait("m", cast(ModelSessions, self.sessions), [name.encode()], request, 600.0)
                self.admitted.append(name)
            finally:
                self.bounds.release(request)

        return asyncio.create_task(wait())

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def free_places(self, count: int) -> None:
        """One after the other."""
        for _ in range(count):
            self.sessions.places = 1
            self.queue.changed()
            await self.settle()


async def test_a_turn_waits_until_there_is_a_place_and_only_the_first_is_tried() -> None:
    site = Site()
    for name in ("one", "two"):
        site.send(name)
    await site.settle()
    assert site.admitted == []
    assert site.bounds.waiting.total == 2
    assert set(site.sessions.tried) == {b"one"}
    site.sessions.places = 1
    site.queue.changed()
    await site.settle()
    assert site.admitted == ["one"]
    site.sessions.places = 1
    site.queue.changed()
    await site.settle()
    assert site.admitted == ["one", "two"]
    assert site.bounds.waiting.total == 0


async def test_a_turn_with_a_place_does_not_wait() -> None:
    site = Site()
    site.sessions.places = 1
    site.send("one")
    await site.settle()
    assert site.admitted == ["one"]


async def test_conversations_with_places_do_not_wait_behind_those_without() -> None:
    site = Site()
    site.send("one")
    site.sessions.residents = {b"two"}
    site.send("two")
    await site.settle()
    assert site.admitted == ["two"]


async def test_no_turn_gets_a_place_before_one_that_has_waited_longer_in_another_gateway() -> None:
    site = Site()
    site.sessions.places, site.sessions.is_next = 1, False
    site.send("one")
    await site.settle()
    assert (site.admitted, len(site.sessions.waiting)) == ([], 1)
    site.sessions.is_next = True
    site.queue.changed()
    await site.settle()
    assert (site.admitted, len(site.sessions.waiting)) == (["one"], 0)


async def test_a_waiting_session_is_served_as_a_visitor_after_its_longest_wait() -> None:
    site = Site(max_wait=0.01)
    await site.send("one")
    assert site.admitted == ["one"]
    assert site.bounds.waiting.total == 0


async def test_a_parent_that_waits_for_its_sub_agent_does_not_block_it() -> None:
    site = Site()
    site.sessions.awaited = {b"sub-agent"}
    for name in ("one", "two", "sub-agent"):
        site.send(name)
    await site.settle()
    site.sessions.places = 1
    site.queue.changed()
    await site.settle()
    assert site.admitted == ["sub-agent"]


async def test_the_order_is_that_of_the_fair_queue() -> None:
    site = Site()
    for name, rank in (("late", 1), ("early", 0)):
        site.send(name, rank)
    await site.settle()
    site.sessions.places = 2
    site.queue.changed()
    await site.settle()
    assert site.admitted == ["early", "late"]


async def test_the_order_of_waiting_sessions_does_not_depend_on_their_size() -> None:
    site = Site()
    for name, num_tokens in (("large", 9000), ("small", 1), ("middle", 100)):
        site.send(name, num_tokens=num_tokens)
    await site.settle()
    await site.free_places(3)
    assert site.admitted == ["large", "small", "middle"]


async def test_keys_share_places_by_weight() -> None:
    """The second one sends later, and less."""
    site, flooding, light = Site(max_waiting=100), Caller("flooding"), Caller("light")
    light.weight = 2.0
    for number in range(20):
        site.send(f"flooding {number}", caller=flooding)
    await site.settle()
    for number in range(6):
        site.send(f"light {number}", caller=light)
    await site.settle()
    await site.free_places(9)
    assert sum(name.startswith("light") for name in site.admitted) == 6


async def test_two_turns_of_one_session_may_wait_and_one_that_is_cancelled_leaves_the_other() -> None:
    site = Site()
    first, _ = site.send("one"), site.send("one")
    await site.settle()
    assert len(site.sessions.waiting) == 2
    first.cancel()
    await site.settle()
    assert len(site.sessions.waiting) == 1
    await site.free_places(1)
    assert site.admitted == ["one"]


async def test_no_turn_waits_for_places_of_a_model_without_engines() -> None:
    site = Site()
    site.send("one")
    await site.settle()
    site.sessions.has_engines = False
    site.queue.changed()
    await site.settle()
    assert site.admitted == ["one"]


async def test_a_turn_whose_client_has_gone_leaves_the_queue() -> None:
    site = Site()
    first, _ = site.send("one"), site.send("two")
    await site.settle()
    first.cancel()
    await site.settle()
    assert site.sessions.tried[-1] == b"two"
    assert site.bounds.waiting.total == 1


async def test_waiting_turns_are_rejected_when_the_gateway_shuts_down() -> None:
    site = Site()
    waiting = site.send("one")
    await site.settle()
    site.queue.close()
    with pytest.raises(ShuttingDown):
        await waiting
    with pytest.raises(ShuttingDown):
        await site.send("two")


async def test_turns_that_wait_count_in_the_bounds_of_the_queue() -> None:
    site = Site(max_waiting=1)
    site.send("one")
    await site.settle()
    with pytest.raises(Exception, match="waiting requests"):
        await site.send("two")


async def test_a_conversation_that_is_larger_than_every_cache_does_not_wait() -> None:
    site = Site()
    site.send("too large")
    await site.settle()
    assert site.admitted == ["too large"]


async def test_turns_that_wait_count_for_the_autoscaler_beside_requests_that_wait_for_capacity() -> None:
    site = Site()
    site.demand.set_waiting("m", 2)
    waiting = site.send("one")
    await site.settle()
    assert site.demand.of("m", prefill=False) == 3
    site.demand.set_waiting("m", 1)
    assert site.demand.of("m", prefill=False) == 2
    waiting.cancel()
    await site.settle()
    assert site.demand.of("m", prefill=False) == 1


async def test_a_queue_without_turns_is_forgotten() -> None:
    site = Site(max_wait=0.01)
    await site.send("one")
    await site.settle()
    assert site.bounds._queues == []
