"""Which requests wait, for how long, and which are admitted, with capacity that the test sets."""

import asyncio
import random

import pytest
from prometheus_client import CollectorRegistry

from proa_gateway.admission.auth import Caller
from proa_gateway.admission.control import engine_capacity
from proa_gateway.admission.fair_queue import AdmissionBounds, QueuedRequest
from proa_gateway.admission.request_queue import RequestQueue
from proa_gateway.errors import EngineUnavailable, Overloaded, QueueTimeout, ShuttingDown
from proa_gateway.observability.metrics import GatewayMetrics
from proa_gateway.scaler.demand import Demand

MODEL = "m"


class Engines:
    """Capacity for `size` sequences; None: no engine is up. `run` is a request: it waits, runs and ends."""

    def __init__(self, size: int | None, *, max_waiting: int = 100, seconds: float = 30.0) -> None:
        self.size = size
        self.running = 0
        self.peak = 0
        self.order: list[str] = []
        self.seconds = seconds
        self.registry = CollectorRegistry()
        self.callers: dict[str, Caller] = {}
        self.bounds = AdmissionBounds(max_requests=10_000, max_waiting=max_waiting, max_queued_tokens=10_000)
        self.queue = RequestQueue(self.bounds, self.capacity, GatewayMetrics(self.registry), Demand(()))

    def capacity(self, model: str, *, enough: int = 0) -> int | None:
        return None if self.size is None else self.size - self.running

    @property
    def depth(self) -> float | None:
        return self.registry.get_sample_value("proa_gateway_queue_depth", {"model": MODEL})

    def admit(self, caller: str, num_sequences: int = 1, priority: int = 0) -> QueuedRequest:
        found = self.callers.setdefault(caller, Caller(caller))
        found.priority = priority
        request = QueuedRequest(found, num_sequences)
        self.bounds.admit(request)
        return request

    async def run(
        self, name: str, *, last: float | asyncio.Event = 0.0, num_sequences: int = 1, cost: int = 1, priority: int = 0
    ) -> None:
        """The caller is `name` without digits at its end."""
        request = self.admit(name.rstrip("0123456789"), num_sequences, priority)
        try:
            if not self.queue.has_capacity(MODEL):
                request.num_tokens, request.cost = 1, cost
                await self.queue.wait_for_capacity(MODEL, request, self.seconds)
            self.order.append(name)
            self.running += num_sequences
            self.peak = max(self.peak, self.running)
            try:
                await (asyncio.sleep(last) if isinstance(last, float) else last.wait())
            finally:
                self.running -= num_sequences
                self.queue.capacity_changed()
        finally:
            self.bounds.release(request)

    async def wait_for_engine(self, model: str, seconds: float = 30.0, *, caller: str = "", priority: int = 0) -> None:
        request = self.admit(caller, priority=priority)
        try:
            await self.queue.wait_for_engine(model, request, seconds)
        finally:
            self.bounds.release(request)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_with_capacity_no_request_waits_and_none_is_queued() -> None:
    engines = Engines(2)
    await engines.run("a")
    assert engines.queue.num_waiting == 0
    assert engines.depth is None
    engines.queue.add_model(MODEL)
    assert engines.depth == 0


async def test_the_end_of_a_request_admits_the_next_one() -> None:
    engines, end = Engines(2), asyncio.Event()
    tasks = [asyncio.create_task(engines.run(f"a{index}", last=end)) for index in range(5)]
    await turns()
    assert (engines.running, engines.queue.num_waiting, engines.depth) == (2, 3, 3)
    end.set()
    await asyncio.gather(*tasks)
    assert engines.order == [f"a{index}" for index in range(5)]
    assert (engines.peak, engines.depth) == (2, 0)


async def test_no_request_overtakes_those_that_wait() -> None:
    engines, end = Engines(1), asyncio.Event()
    first = asyncio.create_task(engines.run("a0", last=end))
    await turns()
    second = asyncio.create_task(engines.run("a1"))
    await turns()
    engines.size = 2
    assert not engines.queue.has_capacity(MODEL)
    engines.queue.capacity_changed()
    await second
    end.set()
    await first


async def test_a_new_request_leaves_the_capacity_to_those_just_admitted() -> None:
    engines, end = Engines(1), asyncio.Event()
    first = asyncio.create_task(engines.run("a0", last=end))
    await turns()
    second = asyncio.create_task(engines.run("a1", last=end))
    await turns()
    engines.size = 2
    engines.queue._admit_waiting()  # the task is to continue, and has not run yet
    assert engines.queue.num_waiting == 0
    assert not engines.queue.has_capacity(MODEL)
    end.set()
    await asyncio.gather(first, second)


async def test_smaller_priorities_are_admitted_first() -> None:
    engines, end = Engines(1), asyncio.Event()
    tasks = [asyncio.create_task(engines.run("first", last=end))]
    for name, priority in (("late", 9), ("soon", 1), ("now", -4)):
        tasks.append(asyncio.create_task(engines.run(name, priority=priority)))
        await turns()
    end.set()
    await asyncio.gather(*tasks)
    assert engines.order == ["first", "now", "soon", "late"]


async def test_a_cancelled_request_leaves_at_once_and_takes_no_capacity() -> None:
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


async def test_a_request_cancelled_when_just_admitted_leaves_its_capacity_to_the_next() -> None:
    engines = Engines(0)
    gone, stays = asyncio.create_task(engines.run("a1")), asyncio.create_task(engines.run("a2"))
    await turns()
    engines.size = 1
    engines.queue._admit_waiting()
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


async def test_a_full_queue_rejects_at_once() -> None:
    engines = Engines(0, max_waiting=2)
    tasks = [asyncio.create_task(engines.run(f"a{index}")) for index in range(2)]
    await turns()
    with pytest.raises(Overloaded):
        await engines.run("a2")
    engines.size = 9
    engines.queue.capacity_changed()
    await asyncio.gather(*tasks)


async def test_in_a_full_queue_the_caller_with_most_requests_is_evicted_from() -> None:
    engines = Engines(0, max_waiting=4)
    tasks = [asyncio.create_task(engines.run(f"flood{index}")) for index in range(4)]
    await turns()
    tasks += [asyncio.create_task(engines.run(f"few{index}")) for index in range(3)]
    await turns()
    engines.size = 9
    engines.queue.capacity_changed()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(engines.order) == ["few0", "few1", "flood0", "flood1"]
    assert sum(isinstance(result, Overloaded) for result in results) == 3


async def test_in_a_full_queue_an_earlier_priority_evicts_a_later_one() -> None:
    engines = Engines(0, max_waiting=1)
    late = asyncio.create_task(engines.run("a", priority=1))
    await turns()
    with pytest.raises(Overloaded):
        await engines.run("c", priority=2)
    soon = asyncio.create_task(engines.run("b", priority=0))
    with pytest.raises(Overloaded):
        await late
    engines.size = 1
    engines.queue.capacity_changed()
    await soon


async def test_requests_wait_until_the_first_engine_is_up() -> None:
    engines = Engines(None)
    held = asyncio.create_task(engines.wait_for_engine(MODEL))
    await turns()
    assert engines.depth == 1
    engines.queue.capacity_changed()
    await turns()
    assert not held.done()
    engines.size = 0  # an engine is up, although it has no capacity yet
    engines.queue.capacity_changed()
    await held
    assert engines.depth == 0
    engines.size = None
    with pytest.raises(EngineUnavailable) as late:
        await engines.wait_for_engine(MODEL, 0.01)
    assert late.value.headers == {"retry-after": "5"}


async def test_a_cancelled_request_is_not_charged() -> None:
    engines = Engines(0)
    gone = asyncio.create_task(engines.run("a", cost=1000))
    both = [asyncio.create_task(engines.run(f"{name}{index}", cost=10)) for index in range(3) for name in "ab"]
    await turns()
    engines.size = 1
    engines.queue._admit_waiting()
    gone.cancel()
    async with asyncio.timeout(5):
        await asyncio.gather(*both)
    assert engines.order == ["a0", "b0", "a1", "b1", "a2", "b2"]


async def test_requests_for_one_model_are_evicted_for_a_caller_with_less_of_another() -> None:
    engines = Engines(None, max_waiting=4)
    flood = [asyncio.create_task(engines.wait_for_engine("coming", caller="flood")) for _ in range(4)]
    await turns()
    few = asyncio.create_task(engines.wait_for_engine("other", caller="few"))
    await turns()
    assert [task.done() for task in flood] == [False, False, False, True]
    with pytest.raises(Overloaded):
        await flood[3]
    spread = asyncio.create_task(engines.wait_for_engine("other", caller="flood"))
    await turns()
    with pytest.raises(Overloaded):
        await flood[2]  # the caller gets no more in all by waiting for several models
    first = asyncio.create_task(engines.wait_for_engine("third", caller="first", priority=-5))
    await turns()
    with pytest.raises(Overloaded):
        await flood[1]
    urgent = [asyncio.create_task(engines.wait_for_engine("third", caller="first", priority=-5)) for _ in range(3)]
    await turns()
    assert all(task.done() for task in (*flood, spread, few))
    assert engines.queue.num_waiting == engines.bounds.waiting.total == 4
    engines.size = 1
    engines.queue.capacity_changed()
    await asyncio.gather(first, *urgent)
    assert engines.bounds.waiting.total == 0


async def test_a_request_just_admitted_is_not_evicted() -> None:
    engines, end = Engines(0, max_waiting=1), asyncio.Event()
    called = asyncio.create_task(engines.run("a", last=end))
    await turns()
    engines.size = 1
    urgent = asyncio.create_task(engines.run("b", last=end, priority=-1))
    engines.queue._admit_waiting()  # the first one's task runs after the urgent one's
    await turns()
    assert engines.order == ["a"]
    assert (engines.bounds.sequences.total, engines.bounds.waiting.total) == (2, 1)
    end.set()
    await asyncio.gather(called, urgent)


async def test_closing_rejects_all_that_wait_and_all_that_would() -> None:
    engines = Engines(None)
    waits = asyncio.create_task(engines.run("a"))
    held = asyncio.create_task(engines.wait_for_engine(MODEL))
    await turns()
    engines.queue.close()
    for task in (waits, held):
        with pytest.raises(ShuttingDown):
            await task
    with pytest.raises(ShuttingDown):
        await engines.run("b")
    assert engines.depth == 0


@pytest.mark.parametrize("seed", range(15))
async def test_with_random_traffic_all_are_served_and_no_capacity_is_lost_or_used_twice(seed: int) -> None:
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
    assert (engines.running, engines.queue.num_waiting) == (0, 0)
    assert all(queue.num_unsent == 0 for queue in engines.queue._models.values())
    limits = engines.bounds.sequences, engines.bounds.waiting, engines.bounds.tokens
    assert [limit.total for limit in limits] == [0, 0, 0]


def test_an_engine_gets_a_batch_and_an_eighth_of_one_to_wait() -> None:
    assert engine_capacity(256, load=0, num_waiting=0) == 288
    assert engine_capacity(256, load=280, num_waiting=24) == 8
    assert engine_capacity(256, load=300, num_waiting=0) == 0
    assert engine_capacity(1, load=1, num_waiting=0) == 1


def test_an_engine_without_memory_for_its_batch_gets_no_more() -> None:
    assert engine_capacity(256, load=140, num_waiting=40) == 0
