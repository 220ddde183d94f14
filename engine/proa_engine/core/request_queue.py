"""RequestQueue: who is waiting, the next one first. Knows no policy but the order that each request carries."""

import heapq

from proa_engine.core.request import Request

Entry = tuple[tuple[int, ...], Request]  # orders are unique, so requests themselves are never compared


class RequestQueue:
    """A priority queue by `Request.order`. Removal leaves a dead entry behind, which is skipped later."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._num_tokens: dict[tuple[int, ...], int] = {}  # of the living, by order
        self.num_tokens = 0  # known tokens of all who wait

    def __len__(self) -> int:
        return len(self._num_tokens)

    def push(self, request: Request) -> None:
        heapq.heappush(self._entries, (request.order, request))
        self._num_tokens[request.order] = request.num_tokens
        self.num_tokens += request.num_tokens

    def peek(self) -> Request | None:
        """The next request, which stays in the queue."""
        while self._entries and self._entries[0][0] not in self._num_tokens:
            heapq.heappop(self._entries)
        return self._entries[0][1] if self._entries else None

    def pop(self) -> Request:
        """Take out the next request. It may be pushed again."""
        request = self.peek()
        assert request is not None, "nobody is waiting"
        heapq.heappop(self._entries)
        self.num_tokens -= self._num_tokens.pop(request.order)
        return request

    def remove(self, request: Request) -> None:
        """Take out `request`, wherever it is, for good."""
        self.num_tokens -= self._num_tokens.pop(request.order)
        if len(self._entries) > 2 * len(self._num_tokens) + 64:  # the dead must not pile up behind a stuck head
            self._entries = [entry for entry in self._entries if entry[0] in self._num_tokens]
            heapq.heapify(self._entries)

    def to_list(self) -> list[Request]:
        """All waiting requests, in order."""
        return [request for order, request in sorted(self._entries, key=_order) if order in self._num_tokens]


def _order(entry: Entry) -> tuple[int, ...]:
    return entry[0]
