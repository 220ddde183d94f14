"""FairLimit: a bound on what all callers hold together, by which none of them can keep the others out.

A caller's share is the bound by its weight among those who hold something. Once the bound is met, who asks for more
gets it from requests that still wait, where it can: from those of a later priority, from a caller of its own priority
that holds more than its share and more than the asking one would, and from its own of a later rank. What runs is left
alone. Where it alone is in the way, a caller still gets its own share, over the bound, and the others get no more until
it is met again. Pure: knows nothing of requests, models or time.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A request's place among others. Smaller priorities come first; `rank` counts inside a flow only: one caller's
    requests."""

    flow: str
    priority: int = 0
    rank: int = 0
    weight: float = 1.0


@dataclass(slots=True, eq=False)
class Stake(Generic[T]):
    """What one request holds. Of a flow's stakes the last one is the first to be taken."""

    owner: T
    claim: Claim
    amount: int
    number: int

    @property
    def order(self) -> tuple[int, int, int]:
        return self.claim.priority, self.claim.rank, self.number


@dataclass(slots=True, eq=False)
class _Flow(Generic[T]):
    """`waiting`: sorted. Priority and weight are those that the caller had last."""

    claim: Claim
    held: int = 0
    waiting: list[Stake[T]] = field(default_factory=list)


class FairLimit(Generic[T]):
    """`givers` decides, `add` and `remove` do. From `wait` to `stop_waiting` a stake may be taken from its owner."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.total = 0
        self._flows: dict[str, _Flow[T]] = {}  # of those who hold something
        self._num_added = 0

    def givers(self, claim: Claim, amount: int) -> list[T] | None:
        """Whose stakes must be removed so that so much can be added: nobody's, mostly. None: it cannot be had."""
        if self.total + amount <= self.most:
            return []
        return _givers(self._flows, claim, amount, self.most)

    def add(self, owner: T, claim: Claim, amount: int, *, waits: bool) -> Stake[T]:
        flow = self._flows.setdefault(claim.flow, _Flow(claim))
        flow.claim = claim
        flow.held += amount
        self.total += amount
        self._num_added += 1
        stake = Stake(owner, claim, amount, self._num_added)
        if waits:
            self.wait(stake)
        return stake

    def remove(self, stake: Stake[T]) -> None:
        self.stop_waiting(stake)
        flow = self._flows[stake.claim.flow]
        flow.held -= stake.amount
        self.total -= stake.amount
        if not flow.held:
            del self._flows[stake.claim.flow]

    def wait(self, stake: Stake[T]) -> None:
        """It may be given away from now on."""
        insort(self._flows[stake.claim.flow].waiting, stake, key=lambda each: each.order)

    def stop_waiting(self, stake: Stake[T]) -> None:
        """It stays with its owner from now on."""
        waiting = self._flows[stake.claim.flow].waiting
        index = bisect_left(waiting, stake.order, key=lambda each: each.order)
        if index < len(waiting) and waiting[index] is stake:
            del waiting[index]


@dataclass(slots=True, eq=False)
class _Holder(Generic[T]):
    """A flow, less what is to be taken from it."""

    claim: Claim
    held: int
    waiting: list[Stake[T]]
    num_left: int  # of those who wait

    @property
    def last(self) -> Stake[T]:
        return self.waiting[self.num_left - 1]

    @property
    def level(self) -> float:
        return self.held / self.claim.weight


def _givers(flows: Mapping[str, _Flow[T]], claim: Claim, amount: int, most: int) -> list[T] | None:
    holders = {name: _Holder(flow.claim, flow.held, flow.waiting, len(flow.waiting)) for name, flow in flows.items()}
    own = holders.setdefault(claim.flow, _Holder(claim, 0, [], 0))
    own.claim = claim
    share = most / sum(holder.claim.weight for holder in holders.values())  # of a weight of one
    missing = sum(holder.held for holder in holders.values()) + amount - most
    givers: list[T] = []
    while missing > 0:
        would_hold = (own.held + amount) / claim.weight
        giver = _next_giver(holders.values(), own, max(share, would_hold))
        if giver is None:
            others = (each for each in holders.values() if each is not own and each.claim.priority >= claim.priority)
            return givers if would_hold <= share and any(each.level > share for each in others) else None
        stake = giver.last
        givers.append(stake.owner)
        giver.num_left -= 1
        giver.held -= stake.amount
        missing -= stake.amount
    return givers


def _next_giver(holders: Iterable[_Holder[T]], own: _Holder[T], level: float) -> _Holder[T] | None:
    """Of the last priority the one that holds most."""

    def gives(holder: _Holder[T]) -> bool:
        if not holder.num_left:
            return False
        last, asking = holder.last.claim, own.claim
        if last.priority != asking.priority:
            return last.priority > asking.priority
        return last.rank > asking.rank if holder is own else holder.level > level

    givers = (holder for holder in holders if gives(holder))
    return max(givers, key=lambda holder: (holder.last.claim.priority, holder.level), default=None)
