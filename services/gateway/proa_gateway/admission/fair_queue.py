"""FairQueue: strict priorities, and inside a priority start-time fair queueing between callers by weight.

Goyal, Vin and Cheng, "Start-time Fair Queuing", SIGCOMM 1996. A flow is one caller's requests. Its tag is the service
that it has received: tokens divided by its weight. The waiting flow with the smallest tag is served next, and its tag
grows by the request's expected cost; `QueuedRequest.settle` corrects the tag when the true cost is known. A flow that
begins to wait starts at least at the virtual time, the tag of the flow served last, so idle time earns no credit. Of
two flows that wait all the time, neither is ahead by more than one request of each (cost over weight), if costs are as
expected.
"""

import asyncio
import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

from proa_gateway.admission.auth import Caller
from proa_gateway.errors import GatewayError


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request from its admission to its release; it waits in a queue in between, or not."""

    caller: Caller
    num_sequences: int = 1
    rank: int = 0  # order among the caller's requests, smaller first
    num_tokens: int = 0  # prompt tokens, once for each sequence
    cost: float = 1.0  # expected tokens of prompts and output, above zero
    turn: asyncio.Future[None] | None = None  # ends its last wait, by a result or an exception
    unsent: bool = False  # its turn has come, and its task has not run since
    queue: "FairQueue | None" = None  # where it waits
    flow: "Flow | None" = field(default=None, repr=False)  # of its last wait
    number: int = 0  # order of arrival
    weight: float = 1.0  # of its caller when it began to wait
    charged: float = 0.0  # tokens of its cost that the flow's tag contains

    def precedes(self, other: "QueuedRequest") -> bool:
        """Whether it is served before the other one whatever their callers have used."""
        if self.caller is other.caller:
            return self.rank < other.rank
        return self.caller.priority < other.caller.priority

    def end_wait(self, error: GatewayError | None = None) -> bool:
        """Wake the task that awaits `turn`. False if it has been cancelled."""
        if self.turn is None or self.turn.done():
            return False
        if error is None:
            self.turn.set_result(None)
        else:
            self.turn.set_exception(error)
        return True

    def settle(self, cost: float) -> None:
        """Correct the flow's tag to the true cost. Without effect on a request that has not been served."""
        if self.flow is not None and self.charged:
            self.flow.tag += (cost - self.charged) / self.weight
            self.charged = cost


@dataclass(slots=True, eq=False)
class Flow:
    """One caller's waiting requests in one queue."""

    caller: Caller
    level: "_Level"
    tag: float = 0.0
    backlog: float = 0.0  # cost over weight of `requests`
    requests: list[QueuedRequest] = field(default_factory=list)  # sorted by `_order`


@dataclass(slots=True, eq=False)
class _Level:
    """The flows of one priority. Exists while one of them waits."""

    priority: int
    virtual_time: float = 0.0
    waiting: dict[Caller, Flow] = field(default_factory=dict)
    idle: dict[Caller, Flow] = field(default_factory=dict)  # flows without requests, ahead of the virtual time


class FairQueue:
    """`arrivals` numbers the requests in the order of their arrival, and may be shared by queues."""

    def __init__(self, arrivals: Iterator[int] | None = None) -> None:
        self._arrivals = arrivals if arrivals is not None else count()
        self._levels: dict[int, _Level] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, request: QueuedRequest) -> None:
        caller = request.caller
        level = self._levels.get(caller.priority)
        if level is None:
            level = self._levels[caller.priority] = _Level(caller.priority)
        flow = level.waiting.get(caller)
        if flow is None:
            flow = level.idle.pop(caller) if caller in level.idle else Flow(caller, level)
            level.waiting[caller] = flow
            flow.tag = max(flow.tag, level.virtual_time)
        request.queue, request.flow, request.number = self, flow, next(self._arrivals)
        request.weight, request.charged = caller.weight, 0.0
        insort(flow.requests, request, key=_order)
        flow.backlog += request.cost / request.weight
        self._num_waiting += 1

    def pop(self) -> QueuedRequest | None:
        """Take out the request to serve next and charge its flow; None if nothing waits."""
        if not self._num_waiting:
            return None
        level = self._levels[min(self._levels)]
        flow = min(level.waiting.values(), key=lambda each: (each.tag, each.requests[0].number))
        request = flow.requests[0]
        level.virtual_time = max(level.virtual_time, flow.tag)
        flow.tag += request.cost / request.weight
        request.charged = request.cost
        self._take_out(request, flow, 0)
        return request

    def remove(self, request: QueuedRequest) -> None:
        """Take out a waiting request without service; its flow is not charged."""
        assert request.queue is self
        assert request.flow is not None
        self._take_out(request, request.flow, bisect_left(request.flow.requests, _order(request), key=_order))

    def _take_out(self, request: QueuedRequest, flow: Flow, index: int) -> None:
        taken = flow.requests.pop(index)
        assert taken is request
        request.queue = None
        self._num_waiting -= 1
        if flow.requests:
            flow.backlog -= request.cost / request.weight
            return
        flow.backlog = 0.0  # without rounding errors
        level = flow.level
        del level.waiting[flow.caller]
        if not level.waiting:
            del self._levels[level.priority]
            return
        level.idle = {caller: idle for caller, idle in level.idle.items() if idle.tag > level.virtual_time}
        level.idle[flow.caller] = flow

    @property
    def flows(self) -> Iterator[Flow]:
        """The flows with waiting requests."""
        return (flow for level in self._levels.values() for flow in level.waiting.values())


def from_last(flows: Iterable[Flow]) -> Iterator[QueuedRequest]:
    """The requests of flows, the one to be served last first: by priority, virtual time until served, and arrival.

    The flows may be of several queues that share their `arrivals`. They must not change during the iteration.
    """
    merged = heapq.merge(*map(_from_last, flows), key=lambda each: each[0], reverse=True)
    return (request for _, request in merged)


def _from_last(flow: Flow) -> Iterator[tuple[tuple[int, float, int], QueuedRequest]]:
    """A request's virtual start is its flow's tag plus the costs of the flow's requests before it."""
    start = flow.tag - flow.level.virtual_time + flow.backlog
    for request in reversed(flow.requests):
        start -= request.cost / request.weight
        yield (flow.level.priority, start, request.number), request


def _order(request: QueuedRequest) -> tuple[int, int]:
    return request.rank, request.number
