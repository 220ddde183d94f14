"""What the gateway's bounds admit, reject and evict: none of three bounds lets one caller keep the others out."""

import random
from collections import Counter

import pytest

from proa_gateway.admission.auth import Caller
from proa_gateway.admission.fair_queue import AdmissionBounds, Bound, QueuedRequest, from_last
from proa_gateway.errors import Overloaded

UNLIMITED = 10**9


class Gateway:
    """Requests that the test admits, queues, starts and ends. `evicted`: each with its error, in order."""

    def __init__(
        self, *, max_requests: int = UNLIMITED, max_waiting: int = UNLIMITED, max_queued_tokens: int = UNLIMITED
    ) -> None:
        self.bounds = AdmissionBounds(
            max_requests=max_requests, max_waiting=max_waiting, max_queued_tokens=max_queued_tokens
        )
        self.queue = self.bounds.new_queue()
        self.callers: dict[str, Caller] = {}
        self.queued: list[QueuedRequest] = []

    def caller(self, name: str, *, priority: int = 0, weight: float = 1) -> Caller:
        caller = self.callers.setdefault(name, Caller(name))
        caller.priority, caller.weight = priority, weight
        return caller

    def run(
        self, name: str, num_sequences: int = 1, *, priority: int = 0, rank: int = 0, weight: float = 1
    ) -> QueuedRequest:
        request = QueuedRequest(self.caller(name, priority=priority, weight=weight), num_sequences, rank)
        self.bounds.admit(request)
        return request

    def wait(self, name: str, num_tokens: int = 1, *, n: int = 1, priority: int = 0, rank: int = 0) -> QueuedRequest:
        """Raises `Overloaded`; the request is then released."""
        request = self.run(name, n, priority=priority, rank=rank)
        self.push(request, num_tokens)
        return request

    def push(self, request: QueuedRequest, num_tokens: int = 1) -> None:
        request.num_tokens, request.cost = num_tokens, num_tokens
        try:
            self.bounds.push(self.queue, request)
        except Overloaded:
            self.end(request)
            raise
        self.queued.append(request)

    def start(self, request: QueuedRequest) -> None:
        """End the request's wait as if an engine had capacity."""
        self.bounds.remove(request)
        request.end_wait()

    def end(self, *requests: QueuedRequest) -> None:
        for request in requests:
            self.bounds.release(request)

    @property
    def evicted(self) -> dict[QueuedRequest, Overloaded]:
        errors = {each: each.turn.exception() for each in self.queued if each.turn is not None and each.turn.done()}
        return {request: error for request, error in errors.items() if isinstance(error, Overloaded)}

    @property
    def all_bounds(self) -> tuple[Bound, ...]:
        return self.bounds.sequences, self.bounds.waiting, self.bounds.tokens

    def totals(self) -> list[int]:
        return [bound.total for bound in self.all_bounds]


async def test_sequences_over_the_limit_are_rejected_until_some_end() -> None:
    gateway = Gateway(max_requests=4)
    three = gateway.run("", 3)
    with pytest.raises(Overloaded) as refused:
        gateway.run("", 2)
    assert (refused.value.limit, refused.value.headers) == ("requests", {"retry-after": "1"})
    gateway.end(three)
    gateway.end(gateway.run("", 4))
    with pytest.raises(Overloaded):
        gateway.run("", 5)
    assert gateway.totals() == [0, 0, 0]


async def test_prompt_tokens_count_while_their_request_waits() -> None:
    gateway = Gateway(max_queued_tokens=100)
    first = gateway.wait("", 60)
    with pytest.raises(Overloaded) as refused:
        gateway.wait("", 60)
    assert refused.value.limit == "tokens"
    gateway.start(first)
    second = gateway.wait("", 60)
    assert gateway.totals() == [2, 1, 60]
    gateway.end(first, second)
    assert gateway.totals() == [0, 0, 0]


async def test_a_prompt_over_the_limit_waits_alone() -> None:
    gateway = Gateway(max_queued_tokens=100)
    only = gateway.wait("", 1000)
    with pytest.raises(Overloaded):
        gateway.wait("", 1)
    gateway.end(only)
    gateway.end(gateway.wait("", 1))


async def test_a_released_request_counts_no_more() -> None:
    gateway = Gateway()
    request = gateway.wait("", 50, n=2)
    assert gateway.totals() == [2, 1, 50]
    for _ in range(2):
        gateway.end(request)
        assert gateway.totals() == [0, 0, 0]
    assert not gateway.queue


async def test_long_prompts_of_one_caller_keep_no_other_out() -> None:
    gateway = Gateway(max_requests=2048, max_waiting=1024, max_queued_tokens=4_194_304)
    flood = [gateway.wait("flood", 8192) for _ in range(512)]
    with pytest.raises(Overloaded):
        gateway.wait("flood", 8192)
    few = [gateway.wait("few", 1000) for _ in range(20)]
    assert set(gateway.evicted) == {flood[-1], flood[-2], flood[-3]}
    assert {error.limit for error in gateway.evicted.values()} == {"tokens"}
    assert gateway.totals()[2] <= 4_194_304
    gateway.end(*flood, *few)
    assert gateway.totals() == [0, 0, 0]


async def test_many_choices_of_one_caller_keep_no_other_out() -> None:
    gateway = Gateway(max_requests=2048)
    running = [gateway.run("flood", 128) for _ in range(3)]
    waiting = [gateway.wait("flood", n=128) for _ in range(13)]
    with pytest.raises(Overloaded):
        gateway.wait("flood")
    few = [gateway.wait("few") for _ in range(128)]
    assert set(gateway.evicted) == {waiting[-1]}
    assert gateway.evicted[waiting[-1]].limit == "requests"
    large = gateway.wait("large", n=128)
    assert set(gateway.evicted) == {waiting[-1], waiting[-2]}
    gateway.end(*running, *waiting, *few, large)
    assert gateway.totals() == [0, 0, 0]


async def test_running_requests_are_not_evicted_and_a_caller_still_gets_its_share() -> None:
    gateway = Gateway(max_requests=8)
    flood = [gateway.run("flood") for _ in range(8)]
    few = [gateway.run("few") for _ in range(4)]
    assert not gateway.evicted
    for flow in ("flood", "few"):
        with pytest.raises(Overloaded):
            gateway.run(flow)
    gateway.end(*flood[:4])
    with pytest.raises(Overloaded):
        gateway.run("flood")
    gateway.end(*flood[4:], *few)
    assert gateway.totals() == [0, 0, 0]


async def test_a_later_priority_gets_no_share_of_what_an_earlier_one_holds() -> None:
    gateway = Gateway(max_requests=8)
    late = [gateway.run("late", priority=5) for _ in range(8)]
    early = [gateway.run("early", priority=-5) for _ in range(4)]
    gateway.end(*late)
    early += [gateway.run("early", priority=-5) for _ in range(4)]
    with pytest.raises(Overloaded):
        gateway.run("late", priority=5)
    gateway.end(*early)


async def test_later_priorities_are_evicted_first_and_earlier_ones_never() -> None:
    gateway = Gateway(max_waiting=4)
    late, soon = gateway.wait("late", priority=1), [gateway.wait("soon", priority=-1) for _ in range(3)]
    with pytest.raises(Overloaded):
        gateway.wait("latest", priority=2)
    soon.append(gateway.wait("soon", priority=-1))
    assert set(gateway.evicted) == {late}
    with pytest.raises(Overloaded):
        gateway.wait("late", priority=1)
    gateway.end(late, *soon)


async def test_a_later_priority_is_evicted_before_a_caller_that_holds_more() -> None:
    gateway = Gateway(max_waiting=4)
    flood, late = [gateway.wait("flood") for _ in range(3)], gateway.wait("late", priority=1)
    few = gateway.wait("few")
    assert set(gateway.evicted) == {late}
    gateway.end(*flood, late, few)


async def test_a_large_request_evicts_from_all_callers_that_hold_much() -> None:
    gateway = Gateway(max_requests=12)
    one, two = [gateway.wait("one") for _ in range(6)], [gateway.wait("two") for _ in range(6)]
    large = gateway.wait("large", n=4)
    assert set(gateway.evicted) == {*one[-2:], *two[-2:]}
    gateway.end(*one, *two, large)


async def test_a_request_of_an_earlier_rank_evicts_its_callers_later_one() -> None:
    gateway = Gateway(max_waiting=2)
    first, last = gateway.wait("", rank=0), gateway.wait("", rank=7)
    with pytest.raises(Overloaded):
        gateway.wait("", rank=7)
    early = gateway.wait("", rank=-1)
    assert set(gateway.evicted) == {last}
    gateway.end(first, last, early)


async def test_no_request_is_evicted_for_one_that_is_rejected() -> None:
    gateway = Gateway(max_waiting=3, max_queued_tokens=100)
    requests = [gateway.wait("a"), gateway.wait("a"), gateway.wait("b", 90)]
    with pytest.raises(Overloaded) as refused:
        gateway.wait("c", 95)  # there is a place for it among those who wait, but not for its tokens
    assert refused.value.limit == "tokens"
    assert not gateway.evicted
    gateway.end(*requests)


async def test_shares_are_by_weight() -> None:
    gateway = Gateway(max_requests=12)
    heavy = [gateway.run("heavy", weight=2) for _ in range(12)]
    light = [gateway.run("light") for _ in range(4)]
    with pytest.raises(Overloaded):
        gateway.run("light")
    gateway.end(*heavy, *light)


async def test_a_caller_within_its_share_of_sequences_is_not_evicted_for_another() -> None:
    gateway = Gateway(max_requests=8)
    running = [gateway.run("flood") for _ in range(6)]
    tail = [gateway.wait("few") for _ in range(2)]
    more = gateway.wait("more")
    assert not gateway.evicted
    assert gateway.bounds.sequences.total == 9
    gateway.end(*running, *tail, more)


@pytest.mark.parametrize("seed", range(40))
async def test_with_random_traffic_only_what_would_be_served_last_is_rejected_and_no_count_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    gateway = Gateway(
        max_requests=rng.randint(4, 60), max_waiting=rng.randint(1, 30), max_queued_tokens=rng.randint(50, 900)
    )
    weights = {name: rng.choice([0.5, 1.0, 1.0, 3.0]) for name in "abcd"[: rng.randint(2, 4)]}
    greed = {name: rng.choice([1, 1, 10]) for name in weights}
    waiting: list[QueuedRequest] = []
    running: list[QueuedRequest] = []

    def admit(name: str) -> QueuedRequest | None:
        """Of one priority: a caller that is rejected or evicted would hold, or holds, more than its share."""
        held: Counter[str] = Counter()
        for each in (*waiting, *running):
            held[each.caller.name] += each.num_sequences
        share = gateway.bounds.sequences.limit / sum(weights[each] for each in {name, *held})
        num_sequences = rng.randint(1, greed[name])
        try:
            request = gateway.run(name, num_sequences, weight=weights[name])
        except Overloaded:
            assert held[name] + num_sequences > share * weights[name]
            assert not gateway.evicted
            return None
        assert all(held[each.caller.name] > share * weights[each.caller.name] for each in gateway.evicted)
        return request

    def push(request: QueuedRequest) -> None:
        """What is served before the request decides whether it may wait, and only what is served after it leaves."""
        request.num_tokens = request.cost = min(
            rng.randint(1, 20) * greed[request.caller.name], gateway.bounds.tokens.limit
        )
        gateway.queue.push(request)
        order = list(from_last(gateway.queue.flows))[::-1]
        gateway.queue.remove(request)
        before, after = order[: order.index(request)], order[order.index(request) + 1 :]
        fits = len(before) < gateway.bounds.waiting.limit and (
            sum(each.num_tokens for each in before) + request.num_tokens <= gateway.bounds.tokens.limit
        )
        try:
            gateway.push(request, request.num_tokens)
        except Overloaded:
            assert not fits
            assert not gateway.evicted
            return
        assert fits
        evicted = list(gateway.evicted)
        assert set(evicted) == set(after[len(after) - len(evicted) :])
        waiting.append(request)

    def forget_evicted() -> None:
        for request in gateway.evicted:
            waiting.remove(request)
        gateway.queued = list(waiting)

    for _ in range(1500):
        action = rng.random()
        if action < 0.6:
            request = admit(rng.choice(list(weights)))
            forget_evicted()
            if request is not None and rng.random() < 0.8:
                push(request)
                forget_evicted()
            elif request is not None:
                running.append(request)
        elif action < 0.8 and waiting:
            request = gateway.bounds.pop(gateway.queue)
            assert request is not None
            request.end_wait()
            request.settle(rng.randint(0, 30))
            waiting.remove(request)
            running.append(request)
        elif action < 0.85 and waiting:
            gateway.end(waiting.pop(rng.randrange(len(waiting))))
        elif running:
            gateway.end(running.pop(rng.randrange(len(running))))
        held = [sum(each.num_sequences for each in (*waiting, *running)), len(waiting)]
        assert gateway.totals() == [*held, sum(each.num_tokens for each in waiting)]
        assert all(bound.total <= bound.limit for bound in gateway.all_bounds[1:])
    gateway.end(*waiting, *running)
    assert gateway.totals() == [0, 0, 0]
    assert not gateway.bounds._sequences_of
