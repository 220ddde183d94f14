"""ResponseStore: the responses that a gateway process keeps, for clients that ask for them or continue them."""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """JSON. `input_items`: all items that the model was given, those of previous responses included."""

    response: bytes
    input_items: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.input_items)


class ResponseStore:
    """Keeps the responses that were used last, up to a number and a size. Callers do not see each other's."""

    def __init__(self, *, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._responses: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()  # the last one was used last
        self._num_bytes = 0

    def put(self, caller: str, id: str, stored: StoredResponse) -> None:
        """Replaces the response with this id, if there is one. One that is larger than the store is not kept."""
        self.delete(caller, id)
        self._responses[caller, id] = stored
        self._num_bytes += stored.num_bytes
        while self._num_bytes > self._max_bytes or len(self._responses) > self._max_responses:
            _, oldest = self._responses.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def get(self, caller: str, id: str) -> StoredResponse | None:
        stored = self._responses.get((caller, id))
        if stored is not None:
            self._responses.move_to_end((caller, id))
        return stored

    def delete(self, caller: str, id: str) -> None:
        if stored := self._responses.pop((caller, id), None):
            self._num_bytes -= stored.num_bytes
