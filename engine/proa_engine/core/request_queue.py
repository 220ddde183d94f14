"""RequestQueue: the waiting requests, by `Request.order`."""

import heapq

from proa_engine.core.request import Request

Entry = tuple[tuple[int, ...], Request]  # orders are unique, so requests themselves are never compared


class RequestQueue:
    """A priority queue. Removed requests stay in the heap as dead entries and are skipped later."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._num_tokens: dict[tuple[int, ...], int] = {}  # of the requests in the queue, by order
        self.num_tokens = 0  # known tokens of all waiting requests

    def __len__(self) -> int:
        return len(self._num_tokens)

    @property
    def num_deferred(self) -> int:
        """Any of the requests can be started."""
        return 0

    def push(self, request: Request) -> None:
        heapq.heappush(self._entries, (request.order, request))
        self._num_tokens[request.order] = request.num_tokens
        self.num_tokens += request.num_tokens

    def peek(self) -> Request | None:
        """The next request, without removing it."""
        while self._entries and self._entries[0][0] not in self._num_tokens:
            heapq.heappop(self._entries)
        return self._entries[0][1] if self._entries else None

    def pop(self) -> Request:
        """Remove the next request. It may be pushed again."""
        request = self.peek()
        assert request is not None, "the queue is empty"
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
