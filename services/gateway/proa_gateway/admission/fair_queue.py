"""The order of waiting requests, fair between callers, and the bounds of what may run and wait."""

import asyncio
import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, takewhile

from proa_gateway.admission.auth import Caller
from proa_gateway.errors import GatewayError, Overloaded


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request from its admission to its release; it waits in a queue in between, or not."""

    caller: Caller
    num_sequences: int = 1  # choices of all its prompts
    rank: int = 0  # order among the caller's requests, smaller first
    is_awaited: bool = False  # before others of its rank, because another conversation waits for its end
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
    level: "_Level"  # of the caller's priority when the first of `requests` came
    tag: float = 0.0  # virtual time at which the first of `requests` begins; cost over weight, like all virtual times
    backlog: float = 0.0  # cost over weight of `requests`
    requests: list[QueuedRequest] = field(default_factory=list)  # sorted by `_order`


@dataclass(slots=True, eq=False)
class _Level:
    """The flows of one priority. Exists while one of them waits."""

    priority: int
    virtual_time: float = 0.0  # largest tag of a flow when it was served; never falls
    waiting: dict[Caller, Flow] = field(default_factory=dict)  # flows with requests
    idle: dict[Caller, Flow] = field(default_factory=dict)  # flows without requests, ahead of the virtual time


class FairQueue:
    """`arrivals` numbers the requests in the order of their arrival, and may be shared by queues."""

    def __init__(self, arrivals: Iterator[int] | None = None) -> None:
        self._arrivals = arrivals if arrivals is not None else count()
        self._levels: dict[int, _Level] = {}  # by priority, the smallest is served first
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
        level, flow = self._next()
        request = flow.requests[0]
        level.virtual_time = max(level.virtual_time, flow.tag)
        flow.tag += request.cost / request.weight
        request.charged = request.cost
        self._take_out(request, flow, 0)
        return request

    def peek(self) -> QueuedRequest | None:
        """The request to serve next; None if nothing waits."""
        return self._next()[1].requests[0] if self._num_waiting else None

    def remove(self, request: QueuedRequest) -> None:
        """Take out a waiting request without service; its flow is not charged."""
        assert request.queue is self
        assert request.flow is not None
        self._take_out(request, request.flow, bisect_left(request.flow.requests, _order(request), key=_order))

    def _next(self) -> tuple[_Level, Flow]:
        level = self._levels[min(self._levels)]
        return level, min(level.waiting.values(), key=lambda each: (each.tag, each.requests[0].number))

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


def _order(request: QueuedRequest) -> tuple[int, bool, int]:
    return request.rank, not request.is_awaited, request.number


@dataclass(slots=True, eq=False)
class Bound:
    """`name` is the label in metrics, `unit` stands in the error message."""

    limit: int
    name: str
    unit: str
    total: int = 0  # what requests hold now

    def error(self) -> Overloaded:
        return Overloaded(f"The server is at its limit of {self.limit} {self.unit}.", limit=self.name)


class AdmissionBounds:
    """`admit` and `release` begin and end a request; `push` and `pop`, or `remove`, a wait in between."""

    def __init__(self, *, max_requests: int, max_waiting: int, max_queued_tokens: int) -> None:
        self.sequences = Bound(max_requests, "requests", "concurrent requests")  # running and waiting
        self.waiting = Bound(max_waiting, "waiting", "waiting requests")
        self.tokens = Bound(max_queued_tokens, "tokens", "queued prompt tokens")
        self._admitted: set[QueuedRequest] = set()
        self._sequences_of: dict[Caller, int] = {}  # of admitted requests; no entry: none
        self._queues: list[FairQueue] = []  # those of all models, for evictions
        self._arrivals = count()  # numbers the requests of all queues

    @property
    def num_requests(self) -> int:
        """Admitted requests, running and waiting."""
        return len(self._admitted)

    def new_queue(self) -> FairQueue:
        """A queue under these bounds. It must be changed only through this object."""
        self._queues.append(FairQueue(self._arrivals))
        return self._queues[-1]

    def drop_queue(self, queue: FairQueue) -> None:
        """Forget an empty queue."""
        self._queues.remove(queue)

    def admit(self, request: QueuedRequest) -> None:
        """Count a request's sequences. Raises `Overloaded`."""
        caller, bound = request.caller, self.sequences
        held = self._sequences_of.get(caller, 0) + request.num_sequences
        if excess := _excess({bound: request.num_sequences}):
            share = self._share(caller)
            within_share = held <= share * caller.weight
            evicted = self._select(self._evictable(request, share if within_share else math.inf), excess)
            if excess and not within_share:
                raise bound.error()
            self._evict(evicted)
        self._admitted.add(request)
        self._sequences_of[caller] = held
        bound.total += request.num_sequences

    def release(self, request: QueuedRequest) -> None:
        """End a request. Without effect if it has been evicted."""
        if request not in self._admitted:
            return
        self.remove(request)
        self._admitted.remove(request)
        self.sequences.total -= request.num_sequences
        self._sequences_of[request.caller] -= request.num_sequences
        if not self._sequences_of[request.caller]:
            del self._sequences_of[request.caller]

    def push(self, queue: FairQueue, request: QueuedRequest) -> asyncio.Future[None]:
        """Let an admitted request wait for its turn, the returned future. Raises `Overloaded`, and so does the future
        where another request takes its place."""
        # A request with more prompt tokens than the bound may wait alone: it would never be served otherwise.
        request.num_tokens = min(request.num_tokens, self.tokens.limit)
        queue.push(request)
        if excess := _excess({self.waiting: 1, self.tokens: request.num_tokens}):
            evicted = self._select(takewhile(lambda other: other is not request, from_last(self._flows())), excess)
            if excess:
                queue.remove(request)
                raise next(iter(excess)).error()
            self._evict(evicted)
        self.waiting.total += 1
        self.tokens.total += request.num_tokens
        request.turn = asyncio.get_running_loop().create_future()
        return request.turn

    def pop(self, queue: FairQueue) -> QueuedRequest | None:
        """Take out the request to serve next; None if nothing waits."""
        request = queue.pop()
        if request is not None:
            self._subtract(request)
        return request

    def remove(self, request: QueuedRequest) -> None:
        """End a request's wait without service. Without effect if it does not wait."""
        if request.queue is not None:
            request.queue.remove(request)
            self._subtract(request)

    def _subtract(self, request: QueuedRequest) -> None:
        self.waiting.total -= 1
        self.tokens.total -= request.num_tokens

    def _share(self, caller: Caller) -> float:
        """Sequences a unit of weight: what callers of earlier priorities leave, divided among all others."""
        left, weight = self.sequences.limit, 0.0
        for each in {*self._sequences_of, caller}:
            if each.priority < caller.priority:
                left -= self._sequences_of[each]
            else:
                weight += each.weight
        return left / weight

    def _evictable(self, request: QueuedRequest, share: float) -> Iterator[QueuedRequest]:
        """Waiting requests that a new one precedes, and those of callers beyond their share, the last ones first."""
        held = dict(self._sequences_of)

        def evictable(other: QueuedRequest) -> bool:
            beyond_share = held[other.caller] > share * other.caller.weight and not other.precedes(request)
            return beyond_share or request.precedes(other)

        # Where the last request of a flow may not be evicted, none of the flow may.
        for other in from_last(flow for flow in self._flows() if evictable(flow.requests[-1])):
            if evictable(other):
                held[other.caller] -= other.num_sequences
                yield other

    def _flows(self) -> Iterator[Flow]:
        return (flow for queue in self._queues for flow in queue.flows)

    def _select(self, candidates: Iterable[QueuedRequest], excess: dict[Bound, int]) -> dict[QueuedRequest, Bound]:
        """The first candidates that reduce the excess, each with a bound that it is evicted for. Subtracts from
        `excess` what they hold."""
        evicted: dict[QueuedRequest, Bound] = {}
        for request in candidates:
            held = {self.sequences: request.num_sequences, self.waiting: 1, self.tokens: request.num_tokens}
            for bound in [each for each in excess if held[each]]:
                evicted.setdefault(request, bound)
                excess[bound] -= held[bound]
                if excess[bound] <= 0:
                    del excess[bound]
            if not excess:
                break
        return evicted

    def _evict(self, evicted: dict[QueuedRequest, Bound]) -> None:
        for request, bound in evicted.items():
            self.release(request)
            request.end_wait(bound.error())


def _excess(amounts: dict[Bound, int]) -> dict[Bound, int]:
    """Return by how much each bound would be exceeded, without those that would not."""
    return {bound: excess for bound, amount in amounts.items() if (excess := bound.total + amount - bound.limit) > 0}
