"""How many more requests the engines should be given now, so that they are never idle and the gateway keeps the order.

An engine takes whatever it is sent and works it off first come, first served; who is sent can no longer be overtaken.
So no more is sent than keeps its batch full: a batch, and a few that wait to take the place of those that end before
the gateway has heard of it, which takes a step or two.
"""

import sys
from collections.abc import Iterable
from typing import Protocol

from proa.contract import Hello, SchedulerStats


class Loaded(Protocol):
    """An engine as this sees it."""

    @property
    def hello(self) -> Hello | None: ...

    @property
    def usable(self) -> bool: ...

    @property
    def load(self) -> int: ...

    @property
    def load_stats(self) -> SchedulerStats: ...


def spare(max_num_seqs: int) -> int:
    """Requests that may wait in an engine: an eighth of its batch."""
    return max(1, max_num_seqs // 8)


def engine_room(max_num_seqs: int, *, load: int, num_waiting: int) -> int:
    """`load`: running and waiting. An engine whose batch is not full while more wait than should lacks memory, or
    time for prompts; more requests would only wait there."""
    return 0 if num_waiting > spare(max_num_seqs) else max(0, max_num_seqs + spare(max_num_seqs) - load)


def model_room(engines: Iterable[Loaded], model: str, *, enough: int = sys.maxsize) -> int | None:
    """Of all engines of the model together, counted until there is enough. None: no engine can be used."""
    room: int | None = None
    for engine in engines:
        if engine.usable and engine.hello is not None and engine.hello.model.model_name == model:
            num_waiting = engine.load_stats.num_waiting_reqs
            room = (room or 0) + engine_room(engine.hello.model.max_num_seqs, load=engine.load, num_waiting=num_waiting)
            if room >= enough:
                break
    return room
