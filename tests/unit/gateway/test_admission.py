"""What is admitted, and who gives way: none of three bounds lets one caller keep the others out."""

import random

import pytest

from proa_gateway.admission.bounds import Admission, Limit, Ticket
from proa_gateway.admission.fair_limit import Claim
from proa_gateway.errors import Overloaded

PLENTY = 10**9


class Gateway:
    """Requests that come, wait, run and end, by hand. `left`: those who had to leave, and why."""

    def __init__(self, *, max_requests: int = PLENTY, max_waiting: int = PLENTY, max_queued_tokens: int = PLENTY):
        self.admission = Admission(
            max_requests=max_requests, max_waiting=max_waiting, max_queued_tokens=max_queued_tokens
        )
        self.left: dict[Ticket, Overloaded] = {}

    @property
    def limits(self) -> tuple[Limit, ...]:
        return self.admission.sequences, self.admission.waiting, self.admission.tokens

    def run(self, flow: str, num_sequences: int = 1, *, priority: int = 0, rank: int = 0, weight: float = 1) -> Ticket:
        return self.admission.admit(Claim(flow=flow, priority=priority, rank=rank, weight=weight), num_sequences)

    def wait(self, flow: str, num_tokens: int = 1, *, n: int = 1, priority: int = 0, rank: int = 0) -> Ticket:
        """Raises `Overloaded`, and then nothing of it is left."""
        ticket = self.run(flow, n, priority=priority, rank=rank)
        self.queue(ticket, num_tokens)
        return ticket

    def queue(self, ticket: Ticket, num_tokens: int = 1) -> None:
        try:
            ticket.wait(lambda error: self.left.update({ticket: error}), num_tokens=num_tokens)
        except Overloaded:
            end(ticket)
            raise

    def totals(self) -> list[int]:
        return [limit.total for limit in self.limits]


def end(*tickets: Ticket) -> None:
    for ticket in tickets:
        with ticket:
            pass


def test_sequences_over_the_limit_are_refused_until_some_end() -> None:
    gateway = Gateway(max_requests=4)
    three = gateway.run("", 3)
    with pytest.raises(Overloaded) as refused:
        gateway.run("", 2)
    assert (refused.value.limit, refused.value.headers) == ("requests", {"retry-after": "1"})
    end(three)
    end(gateway.run("", 4))
    with pytest.raises(Overloaded):
        gateway.run("", 5)
    assert gateway.totals() == [0, 0, 0]


def test_prompt_tokens_count_while_their_request_waits() -> None:
    gateway = Gateway(max_queued_tokens=100)
    first = gateway.wait("", 60)
    with pytest.raises(Overloaded) as refused:
        gateway.wait("", 60)
    assert refused.value.limit == "tokens"
    first.stop_waiting()
    second = gateway.wait("", 60)
    assert gateway.totals() == [2, 1, 60]
    end(first, second)
    assert gateway.totals() == [0, 0, 0]


def test_a_prompt_over_the_limit_waits_alone() -> None:
    gateway = Gateway(max_queued_tokens=100)
    only = gateway.wait("", 1000)
    with pytest.raises(Overloaded):
        gateway.wait("", 1)
    end(only)
    end(gateway.wait("", 1))


def test_a_request_that_fails_leaves_nothing_behind() -> None:
    gateway = Gateway()

    def fail() -> None:
        with gateway.wait("", 50, n=2):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert gateway.totals() == [0, 0, 0]


def test_long_prompts_of_one_caller_keep_nobody_out() -> None:
    gateway = Gateway(max_requests=2048, max_waiting=1024, max_queued_tokens=4_194_304)
    flood = [gateway.wait("flood", 8192) for _ in range(512)]
    with pytest.raises(Overloaded):
        gateway.wait("flood", 8192)
    few = [gateway.wait("few", 1000) for _ in range(20)]
    assert list(gateway.left) == [flood[-1], flood[-2], flood[-3]]
    assert {error.limit for error in gateway.left.values()} == {"tokens"}
    assert gateway.totals()[2] <= 4_194_304
    end(*flood, *few)
    assert gateway.totals() == [0, 0, 0]


def test_many_choices_of_one_caller_keep_nobody_out() -> None:
    gateway = Gateway(max_requests=2048)
    running = [gateway.run("flood", 128) for _ in range(3)]
    waiting = [gateway.wait("flood", n=128) for _ in range(13)]
    with pytest.raises(Overloaded):
        gateway.wait("flood")
    few = [gateway.wait("few") for _ in range(128)]
    assert list(gateway.left) == [waiting[-1]]
    assert gateway.left[waiting[-1]].limit == "requests"
    large = gateway.wait("large", n=128)
    assert list(gateway.left) == [waiting[-1], waiting[-2]]
    end(*running, *waiting, *few, large)
    assert gateway.totals() == [0, 0, 0]


def test_nothing_is_taken_from_who_runs_and_a_caller_gets_its_share_all_the_same() -> None:
    gateway = Gateway(max_requests=8)
    flood = [gateway.run("flood") for _ in range(8)]
    few = [gateway.run("few") for _ in range(4)]
    assert not gateway.left
    for flow in ("flood", "few"):
        with pytest.raises(Overloaded):
            gateway.run(flow)
    end(*flood[:4])
    with pytest.raises(Overloaded):
        gateway.run("flood")
    end(*flood[4:], *few)
    assert gateway.totals() == [0, 0, 0]


def test_a_caller_of_a_later_priority_gets_nothing_over_the_limit_of_an_earlier_one() -> None:
    gateway = Gateway(max_requests=8)
    late = [gateway.run("late", priority=5) for _ in range(8)]
    early = [gateway.run("early", priority=-5) for _ in range(4)]
    end(*late)
    early += [gateway.run("early", priority=-5) for _ in range(4)]
    with pytest.raises(Overloaded):
        gateway.run("late", priority=5)
    end(*early)


def test_later_priorities_give_way_before_anybody_else_and_earlier_ones_never() -> None:
    gateway = Gateway(max_waiting=4)
    late, soon = gateway.wait("late", priority=1), [gateway.wait("soon", priority=-1) for _ in range(3)]
    with pytest.raises(Overloaded):
        gateway.wait("latest", priority=2)
    soon.append(gateway.wait("soon", priority=-1))
    assert list(gateway.left) == [late]
    with pytest.raises(Overloaded):
        gateway.wait("late", priority=1)
    end(late, *soon)


def test_a_later_priority_gives_way_before_a_caller_that_holds_more() -> None:
    gateway = Gateway(max_waiting=4)
    flood, late = [gateway.wait("flood") for _ in range(3)], gateway.wait("late", priority=1)
    few = gateway.wait("few")
    assert list(gateway.left) == [late]
    end(*flood, late, few)


def test_a_large_request_takes_from_all_who_hold_much_and_not_from_one_alone() -> None:
    gateway = Gateway(max_requests=12)
    one, two = [gateway.wait("one") for _ in range(6)], [gateway.wait("two") for _ in range(6)]
    large = gateway.wait("large", n=4)
    assert set(gateway.left) == {*one[-2:], *two[-2:]}
    end(*one, *two, large)


def test_a_callers_own_requests_give_way_to_one_of_an_earlier_rank() -> None:
    gateway = Gateway(max_waiting=2)
    first, last = gateway.wait("", rank=0), gateway.wait("", rank=7)
    with pytest.raises(Overloaded):
        gateway.wait("", rank=7)
    early = gateway.wait("", rank=-1)
    assert list(gateway.left) == [last]
    end(first, last, early)


def test_nobody_leaves_for_a_request_that_is_refused_all_the_same() -> None:
    gateway = Gateway(max_waiting=3, max_queued_tokens=100)
    tickets = [gateway.wait("a"), gateway.wait("a"), gateway.wait("b", 90)]
    with pytest.raises(Overloaded) as refused:
        gateway.wait("c", 95)  # there is a place for it among those who wait, but not for its tokens
    assert refused.value.limit == "tokens"
    assert not gateway.left
    end(*tickets)


def test_shares_are_by_weight() -> None:
    gateway = Gateway(max_requests=12)
    heavy = [gateway.run("heavy", weight=2) for _ in range(12)]
    light = [gateway.run("light") for _ in range(4)]
    with pytest.raises(Overloaded):
        gateway.run("light")
    end(*heavy, *light)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_comes_and_goes_nobody_within_their_share_is_refused_and_nothing_is_lost(seed: int) -> None:
    """Of one priority. Whoever is refused, or has to leave, would hold or holds more than their share of the limit."""
    rng = random.Random(seed)
    gateway = Gateway(
        max_requests=rng.randint(4, 60), max_waiting=rng.randint(1, 30), max_queued_tokens=rng.randint(50, 900)
    )
    sequences, waiting, tokens = gateway.limits
    weights = {flow: rng.choice([0.5, 1.0, 1.0, 3.0]) for flow in "abcd"[: rng.randint(2, 4)]}
    greed = {flow: rng.choice([1, 1, 10]) for flow in weights}
    here: dict[Ticket, dict[Limit, int]] = {}

    def held(limit: Limit, flow: str) -> int:
        return sum(amounts.get(limit, 0) for ticket, amounts in here.items() if ticket.claim.flow == flow)

    def share(limit: Limit, asking: str) -> float:
        flows = {asking, *(flow for flow in weights if held(limit, flow))}
        return limit.most / sum(weights[flow] for flow in flows)

    def ask(flow: str, ticket: Ticket | None, wants: dict[Limit, int]) -> Ticket | None:
        """The next step of a request; checks who pays for it."""
        gateway.left.clear()
        levels = {limit: {each: held(limit, each) / weights[each] for each in weights} for limit in wants}
        shares = {limit: share(limit, flow) for limit in wants}
        try:
            if ticket is None:
                ticket = gateway.run(flow, wants[sequences], weight=weights[flow])
                here[ticket] = {}
            else:
                gateway.queue(ticket, wants[tokens])
        except Overloaded as error:
            (limit,) = (each for each in wants if each.name == error.limit)
            assert levels[limit][flow] + wants[limit] / weights[flow] > shares[limit]
            assert not gateway.left
            if ticket is not None:
                del here[ticket]
            return None
        for gone, error in gateway.left.items():
            (limit,) = (each for each in wants if each.name == error.limit)
            assert gone.claim.flow != flow
            assert levels[limit][gone.claim.flow] > shares[limit]
            assert here[gone].get(waiting) == 1
            del here[gone]
        here[ticket] |= wants
        return ticket

    for _ in range(1500):
        action = rng.random()
        running = [ticket for ticket, amounts in here.items() if waiting not in amounts]
        if action < 0.6:
            flow = rng.choice(list(weights))
            ticket = ask(flow, None, {sequences: rng.randint(1, greed[flow])})
            if ticket is not None and rng.random() < 0.8:
                ask(flow, ticket, {waiting: 1, tokens: min(rng.randint(1, 20) * greed[flow], tokens.most)})
        elif action < 0.8 and here:
            ticket = rng.choice(list(here))
            ticket.stop_waiting()
            here[ticket] = {sequences: here[ticket][sequences]}
        elif running or here:
            ticket = rng.choice(running or list(here))
            end(ticket)
            del here[ticket]
        for limit in gateway.limits:
            assert limit.total == sum(held(limit, flow) for flow in weights)
        assert waiting.total <= waiting.most
        assert tokens.total <= tokens.most
    end(*here)
    assert gateway.totals() == [0, 0, 0]
    assert not any(limit._flows for limit in gateway.limits)
