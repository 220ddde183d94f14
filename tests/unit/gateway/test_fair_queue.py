"""The order of service: priorities are strict, callers of one priority share by weight, no request is lost."""

import random

import pytest

from proa_gateway.admission.auth import Caller
from proa_gateway.admission.fair_queue import FairQueue, QueuedRequest, from_last


class Requests:
    """A queue, and the callers of what is pushed to it."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        self.callers: dict[tuple[str, int], Caller] = {}
        self.labels: dict[QueuedRequest, str] = {}

    def push(
        self, label: str, caller: str = "", *, cost: float = 1.0, rank: int = 0, priority: int = 0, weight: float = 1.0
    ) -> QueuedRequest:
        found = self.callers.setdefault((caller, priority), Caller(caller))
        found.priority, found.weight = priority, weight
        request = QueuedRequest(found, rank=rank, cost=cost)
        self.labels[request] = label
        self.queue.push(request)
        return request

    def pop(self) -> QueuedRequest:
        request = self.queue.pop()
        assert request is not None
        return request

    def serve(self, count: int | None = None) -> list[str]:
        """Labels of the next requests, by default of all."""
        return [self.labels[self.pop()] for _ in range(len(self.queue) if count is None else count)]


def test_one_caller_is_served_in_the_order_of_arrival() -> None:
    requests = Requests()
    for item in "abcde":
        requests.push(item, cost=ord(item) % 7 + 1)
    assert requests.serve() == list("abcde")


def test_smaller_priorities_are_served_first_whatever_callers_have_used() -> None:
    requests = Requests()
    requests.push("late", "a", priority=5)
    requests.push("early", "b", priority=-1, cost=1000)
    requests.push("early too", "b", priority=-1, cost=1000)
    requests.push("middle", "a", priority=0)
    assert requests.serve() == ["early", "early too", "middle", "late"]


def test_a_rank_orders_one_callers_requests_and_has_no_effect_on_others() -> None:
    requests = Requests()
    requests.push("a1", "a")
    requests.push("b1", "b")
    requests.push("a2", "a", rank=-100)
    requests.push("b2", "b")
    assert requests.serve() == ["b1", "a2", "a1", "b2"]


def test_a_single_request_does_not_wait_behind_another_callers_thousand() -> None:
    requests = Requests()
    for _ in range(1000):
        requests.push("flood", "a", cost=10)
    assert requests.serve(500) == ["flood"] * 500
    requests.push("single", "b", cost=10)
    assert "single" in requests.serve(2)


def test_idle_time_earns_no_credit() -> None:
    requests = Requests()
    requests.push("b", "b")
    for _ in range(100):
        requests.push("a", "a")
    assert requests.serve(61).count("a") == 60
    for _ in range(100):
        requests.push("b", "b")
    assert 9 <= requests.serve(20).count("a") <= 11


def test_a_caller_that_used_more_than_its_share_waits_although_it_was_idle() -> None:
    requests = Requests()
    for _ in range(100):
        requests.push("b", "b", cost=1)
    requests.push("a", "a", cost=50)
    assert "a" in requests.serve(2)
    requests.push("a", "a", cost=50)
    assert requests.serve(45) == ["b"] * 45


def test_the_true_cost_corrects_the_expected_one() -> None:
    requests = Requests()
    for _ in range(100):
        requests.push("long", "long", cost=10)
        requests.push("short", "short", cost=10)
    served: list[str] = []
    for _ in range(100):
        request = requests.pop()
        served.append(requests.labels[request])
        request.settle(40 if served[-1] == "long" else 10)
    assert served.count("long") == pytest.approx(20, abs=2)


def test_a_removed_request_is_neither_served_nor_charged() -> None:
    requests = Requests()
    first = requests.push("gone", "a", cost=1000)
    requests.push("a", "a")
    requests.push("b", "b")
    requests.queue.remove(first)
    first.settle(0)
    assert len(requests.queue) == 2
    assert requests.serve() == ["a", "b"]
    assert requests.queue.pop() is None


@pytest.mark.parametrize("seed", range(20))
def test_shares_follow_weights_within_one_request_of_each(seed: int) -> None:
    """The bound that the module states, at every moment while all callers wait."""
    rng = random.Random(seed)
    weights = {f"caller-{index}": rng.choice([0.5, 1.0, 2.0, 5.0]) for index in range(rng.randint(2, 6))}
    largest = dict.fromkeys(weights, 0.0)
    served = dict.fromkeys(weights, 0.0)
    requests = Requests()

    def push(caller: str) -> None:
        cost = rng.choice([1.0, rng.uniform(1, 300), rng.uniform(1, 5000)])
        largest[caller] = max(largest[caller], cost)
        requests.push("", caller, weight=weights[caller], cost=cost)

    for caller in weights:
        push(caller)
        push(caller)
    for _ in range(2000):
        request = requests.pop()
        served[request.caller.name] += request.cost
        push(request.caller.name)
        for one in weights:
            for other in weights:
                apart = abs(served[one] / weights[one] - served[other] / weights[other])
                assert apart <= largest[one] / weights[one] + largest[other] / weights[other] + 1e-6


@pytest.mark.parametrize("seed", range(30))
def test_with_random_arrivals_each_request_is_served_once_by_priority_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    requests = Requests()
    waiting: list[QueuedRequest] = []
    served: list[QueuedRequest] = []
    for _ in range(1500):
        action = rng.random()
        if action < 0.5:
            priority = rng.choice([0, 0, 0, 1, -3])
            waiting.append(requests.push("", rng.choice("abcd"), priority=priority, cost=rng.uniform(1, 100)))
        elif action < 0.6 and waiting:
            requests.queue.remove(waiting.pop(rng.randrange(len(waiting))))
        elif action < 0.7 and served:
            served.pop().settle(rng.uniform(0, 500))
        else:
            request = requests.queue.pop()
            assert (request is None) == (not waiting)  # work conserving
            if request is not None:
                assert request.caller.priority == min(each.caller.priority for each in waiting)
                assert request.number == min(each.number for each in waiting if each.caller is request.caller)
                waiting.remove(request)
                served.append(request)
        assert len(requests.queue) == len(waiting)
    assert set(from_last(requests.queue.flows)) == set(waiting)


@pytest.mark.parametrize("seed", range(20))
def test_from_last_is_the_reverse_of_the_order_of_service(seed: int) -> None:
    rng = random.Random(seed)
    requests = Requests()
    weights = {caller: rng.choice([0.5, 1.0, 4.0]) for caller in "abcd"}
    for _ in range(200):
        for _ in range(rng.randint(0, 4)):
            caller, cost = rng.choice("abcd"), float(rng.randint(1, 50))
            rank, priority = rng.choice([0, 0, 3, -1]), rng.choice([0, 0, 1])
            requests.push("", caller, weight=weights[caller], cost=cost, rank=rank, priority=priority)
        if requests.queue and rng.random() < 0.6:
            requests.pop().settle(rng.uniform(1, 80))
    last_first = list(from_last(requests.queue.flows))
    assert [requests.pop() for _ in range(len(requests.queue))] == last_first[::-1]


def test_requests_of_two_queues_are_compared_by_priority_then_virtual_time_then_arrival() -> None:
    one, other = Requests(), Requests()
    other.queue = FairQueue(one.queue._arrivals)
    one.push("third", "a", cost=10)
    one.push("fifth", "a")
    other.push("fourth", "b")
    other.push("second", "c", priority=-1, cost=100)
    labels = {**one.labels, **other.labels}
    assert [labels[each] for each in from_last([*one.queue.flows, *other.queue.flows])] == [
        "fifth",
        "fourth",
        "third",
        "second",
    ]


def test_no_caller_of_the_same_priority_starves() -> None:
    """One caller floods with cheap requests; the expensive ones of another are served after as many tokens."""
    requests = Requests()
    requests.push("expensive", "b", cost=1000)
    requests.push("expensive", "b", cost=1000)
    served: list[str] = []
    for _ in range(1200):
        requests.push("cheap", "a", cost=1)
        served += requests.serve(1)
    assert served.count("expensive") == 2


def test_the_state_of_idle_callers_is_bounded() -> None:
    requests = Requests()
    for index in range(500):
        requests.push("x", str(index))
        requests.push("y", str(index))
    while requests.queue.pop() is not None:
        assert sum(len(level.idle) + len(level.waiting) for level in requests.queue._levels.values()) <= 500
    assert not requests.queue._levels
