"""FairQueue: whose turn is next. Strict priorities; inside one, start-time fair queueing between flows by weight.

A flow is one caller's line. Each has a tag: the service that it has had, in tokens over its weight. The waiting flow
with the smallest tag is next, and its tag grows by what its request is expected to cost; `Entry.settle` corrects that
once the true cost is known. A flow that comes back starts no earlier than where the others are, so that idling saves
up nothing. Of two flows that wait all the time neither gets ahead of the other by more than one request of each (each
cost over its weight), as long as costs are what was expected. Knows nothing of models, engines or time.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """One waiting item. `rank` orders a flow's own items, smaller first; equals are in the order of arrival."""

    item: T
    rank: int
    number: int
    cost: float
    weight: float
    level: "_Level[T]" = field(repr=False)
    flow: "_Flow[T]" = field(repr=False)
    waiting: bool = True

    @property
    def order(self) -> tuple[int, int]:
        return self.rank, self.number

    def settle(self, cost: float) -> None:
        """Says what it has cost in the end, once it has had its turn."""
        assert not self.waiting
        self.flow.tag += (cost - self.cost) / self.weight


@dataclass(slots=True, eq=False)
class _Flow(Generic[T]):
    name: str
    tag: float = 0.0
    entries: list[Entry[T]] = field(default_factory=list)  # sorted


@dataclass(slots=True, eq=False)
class _Level(Generic[T]):
    """The flows of one priority, from when the first of them waits until none does."""

    priority: int
    clock: float = 0.0  # the tag of whoever was served last
    waiting: dict[str, _Flow[T]] = field(default_factory=dict)
    idle: dict[str, _Flow[T]] = field(default_factory=dict)  # ahead of the clock: they have had more than their share


class FairQueue(Generic[T]):
    """`push` and `remove` stand for an item's coming and going; `pop` gives the next one its turn."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level[T]] = {}
        self._num_pushed = 0
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[T]:
        """All that wait, in no order that means anything."""
        for level in self._levels.values():
            for flow in level.waiting.values():
                yield from (entry.item for entry in flow.entries)

    def push(
        self, item: T, *, flow: str = "", priority: int = 0, rank: int = 0, weight: float = 1.0, cost: float = 1.0
    ) -> Entry[T]:
        """Smaller priorities come first. `cost` is above zero, in the unit of `Entry.settle`."""
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level(priority)
        line = level.waiting.get(flow)
        if line is None:
            line = level.waiting[flow] = level.idle.pop(flow) if flow in level.idle else _Flow(flow)
            line.tag = max(line.tag, level.clock)
        self._num_pushed += 1
        self._num_waiting += 1
        entry = Entry(item, rank, self._num_pushed, cost, weight, level, line)
        insort(line.entries, entry, key=lambda each: each.order)
        return entry

    def pop(self) -> Entry[T] | None:
        """Takes the next entry out, and charges its flow; None where nothing waits."""
        if not self._num_waiting:
            return None
        level = self._levels[min(self._levels)]
        flow = min(level.waiting.values(), key=lambda each: (each.tag, each.entries[0].number))
        entry = flow.entries[0]
        level.clock = max(level.clock, flow.tag)
        flow.tag += entry.cost / entry.weight
        self._take_out(entry, 0)
        return entry

    def remove(self, entry: Entry[T]) -> None:
        """Takes out an entry that still waits; its flow is not charged."""
        index = bisect_left(entry.flow.entries, entry.order, key=lambda each: each.order)
        assert entry.flow.entries[index] is entry
        self._take_out(entry, index)

    def _take_out(self, entry: Entry[T], index: int) -> None:
        level, flow = entry.level, entry.flow
        del flow.entries[index]
        entry.waiting = False
        self._num_waiting -= 1
        if flow.entries:
            return
        del level.waiting[flow.name]
        if not level.waiting:
            del self._levels[level.priority]
            return
        level.idle = {name: idle for name, idle in level.idle.items() if idle.tag > level.clock}
        level.idle[flow.name] = flow
