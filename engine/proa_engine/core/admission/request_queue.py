"""RequestQueue and LoraQueue: the waiting requests, by `Request.order`, without adapters and with them."""

import heapq
from itertools import chain

from proa_engine.core.lora_slots import Adapter, LoraSlots, NoAdapter
from proa_engine.core.request import Request

Entry = tuple[tuple[int, ...], Request]  # orders are unique, so requests themselves are never compared
# A larger number lets a few adapters with steady traffic delay the others longer; a smaller one makes batches smaller,
# because slots are emptied more often.
MAX_PASSED = 32


class RequestQueue:
    """A priority queue. Removed requests stay in the heap as dead entries and are skipped later."""

    num_deferred = 0  # all requests can be started

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._num_tokens: dict[tuple[int, ...], int] = {}  # known tokens of each request, by `Request.order`
        self.num_tokens = 0  # known tokens of all waiting requests

    def __len__(self) -> int:
        return len(self._num_tokens)

    def push(self, request: Request) -> None:
        heapq.heappush(self._entries, (request.order, request))
        self._num_tokens[request.order] = request.num_tokens
        self.num_tokens += request.num_tokens

    @property
    def head(self) -> Request:
        """The next request. The queue must not be empty."""
        assert self._num_tokens, "the queue is empty"
        while self._entries[0][0] not in self._num_tokens:
            heapq.heappop(self._entries)
        return self._entries[0][1]

    def peek(self) -> Request | None:
        """The next request, without removing it."""
        return self.head if self._num_tokens else None

    def pop(self) -> Request:
        """Remove the next request. It may be pushed again."""
        request = self.head
        heapq.heappop(self._entries)
        self.num_tokens -= self._num_tokens.pop(request.order)
        return request

    def remove(self, request: Request) -> None:
        """Remove `request` from anywhere in the queue. It must not be pushed again."""
        self.num_tokens -= self._num_tokens.pop(request.order)
        if len(self._entries) > 2 * len(self._num_tokens) + 64:  # dead entries must not pile up behind the head
            self._entries = [entry for entry in self._entries if entry[0] in self._num_tokens]
            heapq.heapify(self._entries)

    def to_list(self) -> list[Request]:
        """All waiting requests, in order."""
        return [request for order, request in sorted(self._entries, key=_order) if order in self._num_tokens]


def _order(entry: Entry) -> tuple[int, ...]:
    return entry[0]


class _AdapterQueue(RequestQueue):
    """The waiting requests of one adapter."""

    num_passed = 0  # requests that started before older ones of these


class LoraQueue:
    """A `RequestQueue` whose next request is the first without an adapter or whose adapter has or can get a slot.

    So requests that wait for a slot do not block those behind them. An adapter starves when `MAX_PASSED` requests of
    other adapters have started before older ones of its own. As long as one starves, the slot with the fewest running
    requests is emptied: the adapter in it starts no request that is behind the first starving one.
    """

    def __init__(self, slots: LoraSlots) -> None:
        self._slots = slots
        self._queues: dict[Adapter | NoAdapter, _AdapterQueue] = {}  # none is empty

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def num_tokens(self) -> int:
        """Known tokens of all waiting requests."""
        return sum(queue.num_tokens for queue in self._queues.values())

    @property
    def num_deferred(self) -> int:
        """Number of requests whose adapters have no slot and can get none now."""
        if self._slots.has_idle:
            return 0
        return sum(len(queue) for adapter, queue in self._queues.items() if not adapter.has_slot)

    def push(self, request: Request) -> None:
        self._queues.setdefault(request.lora, _AdapterQueue()).push(request)

    def peek(self) -> Request | None:
        """Return the next request that can start, without removing it; None if there is none."""
        queues = self._queues.items()
        if self._slots.has_idle:
            return min((queue.head for _, queue in queues), key=_order_of_request, default=None)
        able = {adapter: queue.head for adapter, queue in queues if adapter.has_slot}
        starving = [queue for adapter, queue in queues if not adapter.has_slot and queue.num_passed >= MAX_PASSED]
        if starving:
            emptied = self._slots.least_used
            if emptied in able and able[emptied].order > min(queue.head.order for queue in starving):
                del able[emptied]
        return min(able.values(), key=_order_of_request, default=None)

    def pop(self) -> Request:
        """Remove the next request that can start. It may be pushed again."""
        request = self.peek()
        assert request is not None, "no request can be started"
        if request.lora.takes_slot:
            self._count_passed(request)
        self._queues[request.lora].pop()
        self._drop_if_empty(request.lora)
        return request

    def remove(self, request: Request) -> None:
        """Remove `request` from anywhere in the queue. It must not be pushed again."""
        self._queues[request.lora].remove(request)
        self._drop_if_empty(request.lora)

    def to_list(self) -> list[Request]:
        """All waiting requests, in order."""
        return sorted(chain.from_iterable(queue.to_list() for queue in self._queues.values()), key=_order_of_request)

    def _count_passed(self, started: Request) -> None:
        """Count that the request of an adapter starts before older ones of adapters without a slot."""
        for adapter, queue in self._queues.items():
            if adapter is started.lora:
                queue.num_passed = 0
            elif not adapter.has_slot:
                queue.num_passed += queue.head.order < started.order

    def _drop_if_empty(self, adapter: Adapter | NoAdapter) -> None:
        if not len(self._queues[adapter]):
            del self._queues[adapter]


def _order_of_request(request: Request) -> tuple[int, ...]:
    return request.order
