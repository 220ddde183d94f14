"""AdmissionBounds: bounds on the requests of all models, and which request a full gateway rejects.

The order of the fair queues decides. A request that begins to wait where a bound is met evicts the waiting requests
that would be served last; if it would be served last itself, it is rejected. Running requests are never evicted, but
count against the bound on sequences. So each caller may have its share of that bound by weight: in place of waiting
requests of callers beyond their shares, and where there are none, beyond the bound.
"""

import asyncio
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, takewhile

from proa_gateway.admission.auth import Caller
from proa_gateway.admission.fair_queue import FairQueue, Flow, QueuedRequest, from_last
from proa_gateway.errors import Overloaded


@dataclass(slots=True, eq=False)
class Bound:
    """`name` is the label in metrics, `unit` stands in the error message."""

    limit: int
    name: str
    unit: str
    total: int = 0

    def error(self) -> Overloaded:
        return Overloaded(f"The server is at its limit of {self.limit} {self.unit}.", limit=self.name)


class AdmissionBounds:
    """`admit` and `release` begin and end a request; `push` and `pop`, or `remove`, a wait in between."""

    def __init__(self, *, max_requests: int, max_waiting: int, max_queued_tokens: int) -> None:
        self.sequences = Bound(max_requests, "requests", "concurrent requests")
        self.waiting = Bound(max_waiting, "waiting", "waiting requests")
        self.tokens = Bound(max_queued_tokens, "tokens", "queued prompt tokens")
        self._admitted: set[QueuedRequest] = set()
        self._sequences_of: dict[Caller, int] = {}
        self._queues: list[FairQueue] = []
        self._arrivals = count()

    @property
    def num_requests(self) -> int:
        """Admitted requests, running and waiting."""
        return len(self._admitted)

    def new_queue(self) -> FairQueue:
        """A queue under these bounds. It must be changed only through this object."""
        self._queues.append(FairQueue(self._arrivals))
        return self._queues[-1]

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
    """By how much bounds would be exceeded."""
    excess = {bound: bound.total + amount - bound.limit for bound, amount in amounts.items()}
    return {bound: amount for bound, amount in excess.items() if amount > 0}
