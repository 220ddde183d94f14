"""Who waits, for how long, and who is let in, with room that the test gives and takes."""

import asyncio
import random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from proa_gateway.admission.bounds import Admission
from proa_gateway.admission.capacity import engine_room
from proa_gateway.admission.fair_limit import Claim
from proa_gateway.admission.waiting_room import WaitingRoom
from proa_gateway.errors import EngineUnavailable, Overloaded, QueueTimeout, ShuttingDown
from proa_gateway.observability.metrics import GatewayMetrics

MODEL = "m"


class Engines:
    """Room for `size` sequences. `run` is a request: it waits where it must, runs, and leaves."""

    def __init__(self, size: int | None, *, max_waiting: int = 100, seconds: float = 30.0) -> None:
        self.size = size
        self.running = 0
        self.peak = 0
        self.order: list[str] = []
        self.seconds = seconds
        self.registry = CollectorRegistry()
        self.admission = Admission(max_requests=10_000, max_waiting=max_waiting, max_queued_tokens=10_000)
        self.waiting = WaitingRoom(self.room, GatewayMetrics(self.registry))

    def room(self, model: str, *, enough: int = 0) -> int | None:
        return None if self.size is None else self.size - self.running

    @property
    def depth(self) -> float | None:
        return self.registry.get_sample_value("proa_gateway_queue_depth", {"model": MODEL})

    async def run(
        self, name: str, *, last: float | asyncio.Event = 0.0, num_sequences: int = 1, cost: int = 1, priority: int = 0
    ) -> None:
        claim = Claim(flow=name.rstrip("0123456789"), priority=priority)
        with self.admission.admit(claim, num_sequences) as ticket:
            if not self.waiting.may_pass(MODEL):
                await self.waiting.wait(MODEL, ticket, self.seconds, num_tokens=1, cost=cost)
            self.order.append(name)
            self.running += num_sequences
            self.peak = max(self.peak, self.running)
            try:
                await (asyncio.sleep(last) if isinstance(last, float) else last.wait())
            finally:
                self.running -= num_sequences
                self.waiting.changed()

    async def hold(self, model: str, seconds: float = 30.0, **claim: Any) -> None:
        with self.admission.admit(Claim(**{"flow": "", **claim}), 1) as ticket:
            await self.waiting.hold(model, ticket, seconds)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_with_room_nobody_waits_and_nothing_is_kept() -> None:
    engines = Engines(2)
    await engines.run("a")
    assert engines.waiting.num_waiting == 0
    assert engines.depth is None
    engines.waiting.know(MODEL)
    assert engines.depth == 0


async def test_who_ends_lets_the_next_one_in() -> None:
    engines, end = Engines(2), asyncio.Event()
    tasks = [asyncio.create_task(engines.run(f"a{index}", last=end)) for index in range(5)]
    await turns()
    assert (engines.running, engines.waiting.num_waiting, engines.depth) == (2, 3, 3)
    end.set()
    await asyncio.gather(*tasks)
    assert engines.order == [f"a{index}" for index in range(5)]
    assert (engines.peak, engines.depth) == (2, 0)


async def test_nobody_passes_those_who_wait() -> None:
    engines, end = Engines(1), asyncio.Event()
    first = asyncio.create_task(engines.run("a0", last=end))
    await turns()
    second = asyncio.create_task(engines.run("a1"))
    await turns()
    engines.size = 2
    assert not engines.waiting.may_pass(MODEL)
    engines.waiting.changed()
    await second
    end.set()
    await first


async def test_a_newcomer_leaves_the_room_to_those_just_called() -> None:
    engines, end = Engines(1), asyncio.Event()
    first = asyncio.create_task(engines.run("a0", last=end))
    await turns()
    second = asyncio.create_task(engines.run("a1", last=end))
    await turns()
    engines.size = 2
    engines.waiting._let_in()  # the waiting task has its answer, and has had no turn yet
    assert engines.waiting.num_waiting == 0
    assert not engines.waiting.may_pass(MODEL)
    end.set()
    await asyncio.gather(first, second)


async def test_smaller_priorities_are_let_in_first() -> None:
    engines, end = Engines(1), asyncio.Event()
    tasks = [asyncio.create_task(engines.run("first", last=end))]
    for name, priority in (("late", 9), ("soon", 1), ("now", -4)):
        tasks.append(asyncio.create_task(engines.run(name, priority=priority)))
        await turns()
    end.set()
    await asyncio.gather(*tasks)
    assert engines.order == ["first", "now", "soon", "late"]


async def test_who_gives_up_leaves_at_once_and_takes_no_room() -> None:
    engines, end = Engines(1), asyncio.Event()
    first = asyncio.create_task(engines.run("a0", last=end))
    await turns()
    gone, stays = asyncio.create_task(engines.run("a1")), asyncio.create_task(engines.run("a2"))
    await turns()
    gone.cancel()
    await turns(2)
    assert engines.depth == 1
    end.set()
    await asyncio.gather(first, stays)
    assert engines.order == ["a0", "a2"]


async def test_who_gives_up_when_just_called_gives_the_room_to_the_next() -> None:
    engines = Engines(0)
    gone, stays = asyncio.create_task(engines.run("a1")), asyncio.create_task(engines.run("a2"))
    await turns()
    engines.size = 1
    engines.waiting._let_in()
    gone.cancel()
    async with asyncio.timeout(5):
        await stays
    assert engines.order == ["a2"]


async def test_a_wait_that_lasts_too_long_ends() -> None:
    engines = Engines(0, seconds=0.01)
    with pytest.raises(QueueTimeout) as late:
        await engines.run("a")
    assert late.value.headers == {"retry-after": "5"}
    assert engines.depth == 0


async def test_a_full_room_refuses_at_once() -> None:
    engines = Engines(0, max_waiting=2)
    tasks = [asyncio.create_task(engines.run(f"a{index}")) for index in range(2)]
    await turns()
    with pytest.raises(Overloaded):
        await engines.run("a2")
    engines.size = 9
    engines.waiting.changed()
    await asyncio.gather(*tasks)


async def test_in_a_full_room_who_has_most_makes_place_for_who_has_less() -> None:
    engines = Engines(0, max_waiting=4)
    tasks = [asyncio.create_task(engines.run(f"flood{index}")) for index in range(4)]
    await turns()
    tasks += [asyncio.create_task(engines.run(f"few{index}")) for index in range(3)]
    await turns()
    engines.size = 9
    engines.waiting.changed()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(engines.order) == ["few0", "few1", "flood0", "flood1"]
    assert sum(isinstance(result, Overloaded) for result in results) == 3


async def test_in_a_full_room_a_later_priority_makes_place_for_an_earlier_one() -> None:
    engines = Engines(0, max_waiting=1)
    late = asyncio.create_task(engines.run("a", priority=1))
    await turns()
    with pytest.raises(Overloaded):
        await engines.run("c", priority=2)
    soon = asyncio.create_task(engines.run("b", priority=0))
    with pytest.raises(Overloaded):
        await late
    engines.size = 1
    engines.waiting.changed()
    await soon


async def test_requests_are_held_until_the_first_engine_is_up() -> None:
    engines = Engines(None)
    held = asyncio.create_task(engines.hold(MODEL))
    await turns()
    assert engines.depth == 1
    engines.waiting.changed()
    await turns()
    assert not held.done()
    engines.size = 0  # up, though it has no room yet: whoever needs it waits for a turn
    engines.waiting.changed()
    await held
    assert engines.depth == 0
    engines.size = None
    with pytest.raises(EngineUnavailable) as late:
        await engines.hold(MODEL, 0.01)
    assert late.value.headers == {"retry-after": "5"}


async def test_whom_nobody_let_in_is_not_charged() -> None:
    engines = Engines(0)
    gone = asyncio.create_task(engines.run("a", cost=1000))
    both = [asyncio.create_task(engines.run(f"{name}{index}", cost=10)) for index in range(3) for name in "ab"]
    await turns()
    engines.size = 1
    engines.waiting._let_in()
    gone.cancel()
    async with asyncio.timeout(5):
        await asyncio.gather(*both)
    assert engines.order == ["a0", "b0", "a1", "b1", "a2", "b2"]


async def test_who_is_held_for_one_model_makes_place_for_a_caller_with_less_of_another() -> None:
    engines = Engines(None, max_waiting=4)
    flood = [asyncio.create_task(engines.hold("coming", flow="flood")) for _ in range(4)]
    await turns()
    few = asyncio.create_task(engines.hold("other", flow="few"))
    await turns()
    assert [task.done() for task in flood] == [False, False, False, True]
    with pytest.raises(Overloaded):
        await flood[3]
    with pytest.raises(Overloaded):
        await engines.hold("other", flow="flood")
    first = asyncio.create_task(engines.hold("third", flow="first", priority=-5))
    await turns()
    with pytest.raises(Overloaded):
        await flood[2]
    urgent = [asyncio.create_task(engines.hold("third", flow="first", priority=-5)) for _ in range(3)]
    await turns()
    assert all(task.done() for task in (*flood, few))
    assert engines.waiting.num_waiting == engines.admission.waiting.total == 4
    engines.size = 1
    engines.waiting.changed()
    await asyncio.gather(first, *urgent)
    assert engines.admission.waiting.total == 0


async def test_nothing_is_taken_from_who_was_just_called() -> None:
    engines, end = Engines(0, max_waiting=1), asyncio.Event()
    called = asyncio.create_task(engines.run("a", last=end))
    await turns()
    engines.size = 1
    urgent = asyncio.create_task(engines.run("b", last=end, priority=-1))
    engines.waiting._let_in()  # the first one has its answer, and gets its turn after the urgent one
    await turns()
    assert engines.order == ["a"]
    assert (engines.admission.sequences.total, engines.admission.waiting.total) == (2, 1)
    end.set()
    await asyncio.gather(called, urgent)


async def test_closing_sends_everybody_away_and_lets_nobody_wait() -> None:
    engines = Engines(None)
    waits = asyncio.create_task(engines.run("a"))
    held = asyncio.create_task(engines.hold(MODEL))
    await turns()
    engines.waiting.close()
    for task in (waits, held):
        with pytest.raises(ShuttingDown):
            await task
    with pytest.raises(ShuttingDown):
        await engines.run("b")
    assert engines.depth == 0


@pytest.mark.parametrize("seed", range(15))
async def test_whoever_comes_and_goes_all_are_served_and_no_room_is_lost_or_given_twice(seed: int) -> None:
    rng = random.Random(seed)
    engines = Engines(rng.randint(1, 4), max_waiting=1000)
    tasks: list[asyncio.Task[None]] = []
    given_up: set[asyncio.Task[None]] = set()
    for index in range(300):
        name = f"{rng.choice('abc')}{index}"
        tasks.append(asyncio.create_task(engines.run(name, last=rng.choice([0.0, 0.0005]), cost=rng.randint(1, 9))))
        if rng.random() < 0.3:
            await turns(rng.randint(1, 3))
        if rng.random() < 0.3:
            task = rng.choice(tasks)
            if task.cancel():
                given_up.add(task)
    async with asyncio.timeout(20):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert {task for task in tasks if task.cancelled()} <= given_up
    assert engines.peak <= (engines.size or 0)
    assert (engines.running, engines.waiting.num_waiting) == (0, 0)
    assert all(line.num_called == 0 for line in engines.waiting._lines.values())
    limits = engines.admission.sequences, engines.admission.waiting, engines.admission.tokens
    assert [limit.total for limit in limits] == [0, 0, 0]


def test_an_engine_gets_a_batch_and_an_eighth_of_one_to_wait() -> None:
    assert engine_room(256, load=0, num_waiting=0) == 288
    assert engine_room(256, load=280, num_waiting=24) == 8
    assert engine_room(256, load=300, num_waiting=0) == 0
    assert engine_room(1, load=1, num_waiting=0) == 1


def test_an_engine_without_memory_for_its_batch_gets_no_more() -> None:
    assert engine_room(256, load=140, num_waiting=40) == 0
