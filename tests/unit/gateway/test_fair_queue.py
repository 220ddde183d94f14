"""Whose turn is next: priorities are strict, callers share by weight, and nobody's place is lost."""

import random
from dataclasses import dataclass

import pytest

from proa_gateway.admission.fair_queue import Entry, FairQueue


@dataclass(frozen=True)
class Job:
    flow: str
    number: int
    cost: float


def names(queue: FairQueue[str], count: int | None = None) -> list[str]:
    taken: list[str] = []
    while len(taken) != count and (entry := queue.pop()) is not None:
        taken.append(entry.item)
    return taken


def test_one_caller_is_served_in_the_order_of_arrival() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in "abcde":
        queue.push(item, cost=ord(item) % 7 + 1)
    assert names(queue) == list("abcde")


def test_smaller_priorities_come_first_whoever_has_had_what() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("late", flow="a", priority=5)
    queue.push("early", flow="b", priority=-1, cost=1000)
    queue.push("early too", flow="b", priority=-1, cost=1000)
    queue.push("middle", flow="a", priority=0)
    assert names(queue) == ["early", "early too", "middle", "late"]


def test_a_rank_orders_a_callers_own_requests_and_gains_nothing_over_others() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a1", flow="a")
    queue.push("b1", flow="b")
    queue.push("a2", flow="a", rank=-100)
    queue.push("b2", flow="b")
    assert names(queue) == ["b1", "a2", "a1", "b2"]


def test_who_has_one_request_does_not_wait_for_anothers_thousand() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(1000):
        queue.push("flood", flow="a", cost=10)
    assert names(queue, 500) == ["flood"] * 500
    queue.push("single", flow="b", cost=10)
    assert "single" in names(queue, 2)


def test_idling_saves_up_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("b", flow="b")
    for _ in range(100):
        queue.push("a", flow="a")
    assert names(queue, 61).count("a") == 60
    for _ in range(100):
        queue.push("b", flow="b")
    assert 9 <= names(queue, 20).count("a") <= 11


def test_who_has_had_more_than_their_share_waits_although_they_had_left() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(100):
        queue.push("b", flow="b", cost=1)
    queue.push("a", flow="a", cost=50)
    assert "a" in names(queue, 2)
    queue.push("a", flow="a", cost=50)
    assert names(queue, 45) == ["b"] * 45


def test_a_true_cost_corrects_what_was_expected() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(100):
        queue.push("long", flow="long", cost=10)
        queue.push("short", flow="short", cost=10)
    served: list[str] = []
    for _ in range(100):
        entry = queue.pop()
        assert entry is not None
        served.append(entry.item)
        entry.settle(40 if entry.item == "long" else 10)
    assert served.count("long") == pytest.approx(20, abs=2)


def test_a_request_that_leaves_is_not_charged_and_not_served() -> None:
    queue: FairQueue[str] = FairQueue()
    first = queue.push("gone", flow="a", cost=1000)
    queue.push("a", flow="a")
    queue.push("b", flow="b")
    queue.remove(first)
    assert len(queue) == 2
    assert sorted(queue) == ["a", "b"]
    assert names(queue) == ["a", "b"]
    assert queue.pop() is None


@pytest.mark.parametrize("seed", range(20))
def test_shares_follow_weights_within_one_request_of_each(seed: int) -> None:
    """The bound that the module states, at every moment while all callers wait."""
    rng = random.Random(seed)
    weights = {f"caller-{index}": rng.choice([0.5, 1.0, 2.0, 5.0]) for index in range(rng.randint(2, 6))}
    largest = dict.fromkeys(weights, 0.0)
    served = dict.fromkeys(weights, 0.0)
    queue: FairQueue[Job] = FairQueue()

    def push(flow: str) -> None:
        cost = rng.choice([1.0, rng.uniform(1, 300), rng.uniform(1, 5000)])
        largest[flow] = max(largest[flow], cost)
        queue.push(Job(flow, 0, cost), flow=flow, weight=weights[flow], cost=cost)

    for flow in weights:
        push(flow)
        push(flow)
    for _ in range(2000):
        entry = queue.pop()
        assert entry is not None
        served[entry.item.flow] += entry.item.cost
        push(entry.item.flow)
        for one in weights:
            for other in weights:
                apart = abs(served[one] / weights[one] - served[other] / weights[other])
                assert apart <= largest[one] / weights[one] + largest[other] / weights[other] + 1e-6


@pytest.mark.parametrize("seed", range(30))
def test_whatever_comes_and_goes_everyone_is_served_once_by_priority_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    queue: FairQueue[Job] = FairQueue()
    waiting: dict[int, tuple[Entry[Job], int]] = {}  # number -> entry, priority
    settled: list[Entry[Job]] = []
    for number in range(1500):
        action = rng.random()
        if action < 0.5:
            job = Job(rng.choice("abcd"), number, rng.uniform(1, 100))
            priority = rng.choice([0, 0, 0, 1, -3])
            weight = rng.choice([1, 2])
            waiting[number] = (
                queue.push(job, flow=job.flow, priority=priority, cost=job.cost, weight=weight),
                priority,
            )
        elif action < 0.6 and waiting:
            entry, _ = waiting.pop(rng.choice(list(waiting)))
            queue.remove(entry)
        elif action < 0.7 and settled:
            settled.pop().settle(rng.uniform(0, 500))
        else:
            popped = queue.pop()
            assert (popped is None) == (not waiting)  # work conserving
            if popped is not None:
                priority = waiting[popped.item.number][1]
                assert priority == min(each for _, each in waiting.values())
                same = [n for n, (e, p) in waiting.items() if p == priority and e.item.flow == popped.item.flow]
                assert popped.item.number == min(same)
                del waiting[popped.item.number]
                settled.append(popped)
        assert len(queue) == len(waiting)
    assert {job.number for job in queue} == set(waiting)


def test_nobody_of_the_same_priority_starves() -> None:
    """One caller floods with cheap requests; the dear one of another is served once the flood has had as much."""
    queue: FairQueue[str] = FairQueue()
    queue.push("dear", flow="b", cost=1000)
    queue.push("dear", flow="b", cost=1000)
    served: list[str] = []
    for _ in range(1200):
        queue.push("cheap", flow="a", cost=1)
        entry = queue.pop()
        assert entry is not None
        served.append(entry.item)
    assert served.count("dear") == 2


def test_what_is_kept_of_callers_who_left_is_bounded() -> None:
    queue: FairQueue[str] = FairQueue()
    for index in range(500):
        queue.push("x", flow=str(index))
        queue.push("y", flow=str(index))
    while queue.pop() is not None:
        assert sum(len(level.idle) + len(level.waiting) for level in queue._levels.values()) <= 500
    assert not queue._levels
